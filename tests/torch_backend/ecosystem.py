"""Libraries that train with torch.distributed, on ferrodist and on Gloo: the results are equal.

``make torch-ecosystem`` runs it, in an environment of its own. Every library trains a small network
with random weights on two ranks, each with data of its own, and nothing is downloaded. Then the
weights of both ranks and both backends are compared bit for bit: a sum of two does not depend on
the order. The functions below are all that a program has to change.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

Weights = dict[str, Tensor]
_RANKS, _STEPS, _BATCH, _WIDTH = 2, 4, 4, 8
_LIMIT = 180.0  # seconds for one training, most of which are imports


def _examples(rank: int) -> list[Tensor]:
    """Make the data of one rank, of which no other has any."""
    torch.manual_seed(100 + rank)
    return [torch.randn(_BATCH, _WIDTH) for _ in range(_STEPS)]


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_WIDTH, 16), nn.Tanh(), nn.Linear(16, _WIDTH))


def _loss(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (network(x) - x).square().mean()


def train_with_transformers(backend: str) -> Weights:
    """Train a small GPT-2 with Trainer, and evaluate it: losses are gathered from all ranks."""
    dist.init_process_group(backend)  # before TrainingArguments, which uses what is there
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    size = {"n_layer": 1, "n_head": 2, "n_embd": _WIDTH, "n_positions": 16, "vocab_size": 50}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    words = [torch.randint(50, (16,)) for _ in range(_STEPS * _BATCH * _RANKS)]
    data = [{"input_ids": one, "labels": one} for one in words]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=_STEPS,
            per_device_train_batch_size=_BATCH,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    return {**model.state_dict(), "the loss of all ranks": torch.tensor(loss)}


def train_with_accelerate(backend: str) -> Weights:
    """Train with Accelerator: its DDP, its gradient accumulation, its gather."""
    dist.init_process_group(backend)  # before Accelerator, which uses what is there
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = _network()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    wrapped, optimizer = accelerator.prepare(network, optimizer)
    losses = []
    for x in _examples(accelerator.process_index):
        with accelerator.accumulate(wrapped):
            loss = _loss(wrapped, x)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()))
    return {**network.state_dict(), "the losses of all ranks": torch.stack(losses)}


def train_with_fabric(backend: str) -> Weights:
    """Train with Lightning's Fabric."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=backend)
    fabric = Fabric(accelerator="cpu", devices=_RANKS, strategy=strategy)
    fabric.launch()
    network = _network()
    wrapped, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=0.01))
    losses = []
    for x in _examples(fabric.global_rank):
        loss = _loss(wrapped, x)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_gather(loss.detach()))
    return {**network.state_dict(), "the losses of all ranks": torch.stack(losses)}


def train_with_lightning(backend: str) -> Weights:
    """Train with Lightning's Trainer; ``sync_dist`` averages what is logged over the ranks."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc] # torch's class has no types here
        def __init__(self) -> None:
            super().__init__()
            self.network = _network()

        def training_step(self, batch: Tensor) -> Tensor:
            loss = _loss(self.network, batch)
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Tensor) -> None:
            # At the end of an epoch Lightning averages numbers of examples, which are integers.
            self.log("validation loss", _loss(self.network, batch), sync_dist=True)
            self.log("positive", int((batch > 0).sum()), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=_RANKS,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,  # every rank has data of its own
    )
    module = Module()
    loader = torch.utils.data.DataLoader(_examples(int(os.environ["RANK"])), batch_size=None)
    trainer.fit(module, loader, loader)
    return {**module.state_dict(), **trainer.callback_metrics}


LIBRARIES: dict[str, tuple[Callable[[str], Weights], str]] = {
    "transformers": (train_with_transformers, "transformers"),
    "accelerate": (train_with_accelerate, "accelerate"),
    "Lightning Fabric": (train_with_fabric, "lightning"),
    "Lightning Trainer": (train_with_lightning, "lightning"),
}


def run_rank(library: str, backend: str, folder: str) -> None:
    """Train as one rank, and write down the weights and what the groups were."""
    torch.set_num_threads(1)
    steps: list[Any] = []
    register_optimizer_step_post_hook(lambda *_: steps.append(1))
    weights = LIBRARIES[library][0](backend)
    groups = {type(group) for group in dist.distributed_c10d._world.pg_map}
    found = {
        "world": f"{type(dist.group.WORLD).__module__}.{type(dist.group.WORLD).__name__}",
        "groups": sorted(kind.__module__ for kind in groups),
        "size": dist.get_world_size(),
        "steps": len(steps),
        "weights": {name: value.detach().clone() for name, value in weights.items()},
    }
    torch.save(found, Path(folder) / f"{backend}-{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


def train(library: str, backend: str, folder: str) -> list[dict[str, Any]]:
    """Train on two ranks, as torchrun starts them; return what they have written down."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={_RANKS}", __file__, library, backend, folder]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False
    )
    if done.returncode:
        raise SystemExit(f"{library} on {backend} failed:\n{done.stdout}\n{done.stderr}")
    return [torch.load(Path(folder) / f"{backend}-{rank}") for rank in range(_RANKS)]


def compare(library: str) -> list[str]:
    """Train on both backends; return what is wrong with the results, nothing if they are equal."""
    with tempfile.TemporaryDirectory() as folder:
        ours, gloo = (train(library, backend, folder) for backend in ("ferrodist", "gloo"))
    wrong = []
    for rank, (one, other) in enumerate(zip(ours, gloo, strict=True)):
        if one["world"] != "ferrodist.torch.process_group.ProcessGroup" or one["size"] != _RANKS:
            wrong.append(f"rank {rank}: the world is a {one['world']} of {one['size']} ranks")
        if one["groups"] != ["ferrodist.torch.process_group"]:
            wrong.append(f"rank {rank}: there are groups of {one['groups']}")
        if other["world"].startswith("ferrodist"):
            wrong.append(f"rank {rank}: what should be Gloo's is a {other['world']}")
        if not one["steps"] == other["steps"] >= 2:
            wrong.append(f"rank {rank}: {one['steps']} steps, with Gloo {other['steps']}")
        for name, value in one["weights"].items():
            if not torch.equal(value, other["weights"][name]):
                wrong.append(f"rank {rank}: {name} differs from Gloo's")
            if not torch.equal(value, ours[0]["weights"][name]):
                wrong.append(f"rank {rank}: {name} differs from rank 0's")
    return wrong


def main() -> None:
    """Train with every library, or those whose names are given."""
    has_failed = False
    for library in sys.argv[1:] or LIBRARIES:
        start = time.monotonic()
        wrong = compare(library)
        has_failed |= bool(wrong)
        result = "; ".join(wrong) or "equal to Gloo bit for bit"
        package = LIBRARIES[library][1]
        about = f"{package} {version(package)}, torch {torch.__version__}"
        print(f"{library} ({about}): {result}, {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(*sys.argv[1:])
    else:
        main()
