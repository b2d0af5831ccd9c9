# SPDX-License-Identifier: MIT OR Apache-2.0
"""The demo's task: tell the arms of a spiral apart, with a small network in plain NumPy.

Nothing here is distributed. Everything is float32 and made from a seed.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Weights = list[Array]  # matrix and bias of layer 1, matrix and bias of layer 2, ...

ARMS = 3
TURNS = 2.0
NOISE = 0.02
LAYER_SIZES = (2, 64, 64, ARMS)
LEARNING_RATE = np.float32(0.03)
MOMENTUM = np.float32(0.9)

# 32 x 64 x 64 is small enough for BLAS to stay on one thread, so a product has the same bits in
# every run, however busy the machine is.
SHARD_SIZE = 32


class Points(NamedTuple):
    """Places in the plane and the arm each belongs to."""

    places: Array
    arms: NDArray[np.int64]


def make_points(seed: int, count: int = 4000) -> Points:
    """Scatter points along the arms of a spiral."""
    random = np.random.default_rng(seed)
    arms = random.integers(ARMS, size=count)
    radius = np.sqrt(random.random(count))
    angle = 2 * np.pi * (TURNS * radius + arms / ARMS)
    places = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    places += random.normal(scale=NOISE, size=places.shape)
    return Points(places.astype(np.float32), arms)


def take_shard(points: Points, seed: int, step: int, rank: int, num_ranks: int) -> Points:
    """Return one rank's part of the batch of a step; all ranks draw the same batch."""
    random = np.random.default_rng([seed, step])
    batch = random.integers(len(points.arms), size=(num_ranks, SHARD_SIZE))
    return Points(points.places[batch[rank]], points.arms[batch[rank]])


def new_weights(seed: int) -> Weights:
    """Make the weights a training begins with."""
    random = np.random.default_rng(seed)
    weights = []
    for inputs, outputs in itertools.pairwise(LAYER_SIZES):
        matrix = random.normal(scale=np.sqrt(2 / inputs), size=(inputs, outputs))
        weights += [matrix.astype(np.float32), np.zeros(outputs, np.float32)]
    return weights


def name_of(index: int) -> str:
    """Name an entry of Weights."""
    return f"layer {index // 2 + 1} {'bias' if index % 2 else 'matrix'}"


def loss_and_gradients(weights: Weights, points: Points) -> tuple[Array, Weights]:
    """Return the cross entropy of the points and its gradient by every weight."""
    layers = _forward(weights, points.places)
    loss, slope = _cross_entropy(layers[-1], points.arms)
    gradients: Weights = []
    for index in reversed(range(len(layers) - 1)):
        entering, matrix = layers[index], weights[2 * index]
        gradients[:0] = [entering.T @ slope, slope.sum(axis=0)]
        slope = slope @ matrix.T * (1 - entering * entering)  # 1 - tanh², through the layer below
    return loss, gradients


def loss_and_accuracy(weights: Weights, points: Points) -> tuple[float, float]:
    """Return the cross entropy and the share of points whose arm is found."""
    scores = _forward(weights, points.places)[-1]
    loss, _ = _cross_entropy(scores, points.arms)
    return float(loss), float(np.mean(scores.argmax(axis=1) == points.arms))


class Momentum:
    """Gradient descent that keeps part of its last step."""

    def __init__(self, weights: Weights) -> None:
        self._steps = [np.zeros_like(weight) for weight in weights]

    def update(self, weights: Weights, gradients: Weights) -> None:
        """Move the weights, in place."""
        for weight, step, gradient in zip(weights, self._steps, gradients, strict=True):
            step *= MOMENTUM
            step -= LEARNING_RATE * gradient
            weight += step


def _forward(weights: Weights, places: Array) -> list[Array]:
    """Return what enters each layer and, last, the scores of the arms."""
    layers = [places]
    for matrix, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        layers.append(np.tanh(layers[-1] @ matrix + bias))
    return [*layers, layers[-1] @ weights[-2] + weights[-1]]


def _cross_entropy(scores: Array, arms: NDArray[np.int64]) -> tuple[Array, Array]:
    """Return the loss and its slope by the scores."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1, keepdims=True)
    own = np.arange(len(arms)), arms
    loss = np.mean(np.log(sums[:, 0]) - shifted[own])
    slope = exponentials / sums
    slope[own] -= 1
    return np.asarray(loss, np.float32), slope / np.float32(len(arms))
