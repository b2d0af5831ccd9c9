// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/message_array.hpp"

#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "bind/hooks.hpp"
#include "bind/python.hpp"
#include "core/memory.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {
namespace {

// The size that a header says; nothing if it is more than any memory holds.
std::optional<std::uint64_t> size_of(const ArrayView& form) {
    std::uint64_t nbytes = item_size(form.dtype);
    bool is_empty = false;
    for (int axis = 0; axis < form.num_axes; ++axis) {
        if (form.shape[axis] < 0) {
            return std::nullopt;
        }
        is_empty = is_empty || form.shape[axis] == 0;
    }
    for (int axis = 0; axis < form.num_axes && !is_empty; ++axis) {
        if (__builtin_mul_overflow(nbytes, static_cast<std::uint64_t>(form.shape[axis]), &nbytes)) {
            return std::nullopt;
        }
    }
    return is_empty ? 0 : nbytes;
}

bool read_header(core::Bytes header, ArrayView& form, ArrayKind& kind) {
    if (header.size() < 3) {
        return false;
    }
    const auto dtype = std::to_integer<std::size_t>(header[0]);
    form.num_axes = std::to_integer<int>(header[1]);
    const auto lengths = header.subspan(2, header.size() - 3);
    if (dtype >= num_array_dtypes || form.num_axes > max_axes || lengths.size() != 8 * static_cast<std::size_t>(form.num_axes) ||
        (header.back() > static_cast<std::byte>(last_kind) && !core::is_object(header))) {
        return false;
    }
    form.dtype = static_cast<DType>(dtype);
    std::memcpy(form.shape, lengths.data(), lengths.size());
    kind = static_cast<ArrayKind>(header.back());
    return kind != ArrayKind::none && kind != ArrayKind::adapted;  // nobody sends these
}

bool is_number(DType dtype) {
    return dtype == DType::boolean || dtype == DType::int64 || dtype == DType::float64 || dtype == DType::complex128;
}

void delete_bytes(void* memory) noexcept { delete[] static_cast<std::byte*>(memory); }

}  // namespace

ArrayHeader::ArrayHeader(const ArrayView& array, ArrayKind kind)
    : nbytes_(3 + 8 * static_cast<std::size_t>(array.num_axes)) {
    bytes_[0] = static_cast<std::byte>(array.dtype);
    bytes_[1] = static_cast<std::byte>(array.num_axes);
    std::memcpy(bytes_.data() + 2, array.shape, nbytes_ - 3);
    bytes_[nbytes_ - 1] = static_cast<std::byte>(kind);
}

// -- made of what comes ------------------------------------------------------------------------------

void ReleaseMemory::operator()(std::byte* memory) const {
    (is_warm ? release_warm : delete_bytes)(memory);
}

std::byte* ReceivedArray::make(core::Bytes header, std::uint64_t nbytes) {
    if (!read_header(header, form_, kind_) || size_of(form_) != nbytes ||
        nbytes > static_cast<std::uint64_t>(std::numeric_limits<std::ptrdiff_t>::max()) ||
        (kind_ == ArrayKind::number && (form_.num_axes > 0 || !is_number(form_.dtype)))) {
        return nullptr;
    }
    form_.nbytes = nbytes;
    memory_.reset();
    if (nbytes <= sizeof small_) {
        return form_.data = small_;
    }
    const bool is_warm = nbytes >= smallest_warm;
    memory_ = {is_warm ? static_cast<std::byte*>(take_warm(nbytes)) : new std::byte[nbytes], ReleaseMemory{is_warm}};
    return form_.data = memory_.get();
}

nb::object ReceivedArray::finish() {
    if (kind_ == ArrayKind::number) {
        return number_of(form_.data, form_.dtype);
    }
    const bool is_numpy = kind_ == ArrayKind::numpy || kind_ == ArrayKind::numpy_scalar;
    nb::object array = is_numpy ? over(form_.dtype, form_.num_axes, form_.shape) : nb::object();
    if (!array.is_valid()) {
        return made_by_python();
    }
    return kind_ == ArrayKind::numpy_scalar && form_.num_axes == 0 ? scalar_of(array.ptr()) : array;
}

// A NumPy array of the message's memory; invalid for bfloat16 where ml_dtypes is missing.
nb::object ReceivedArray::over(DType dtype, int num_axes, const std::ptrdiff_t* shape) {
    if (memory_ == nullptr) {
        nb::object array = new_array_of(dtype, num_axes, shape);
        if (ArrayView view; array.is_valid() && view_plain_array(array.ptr(), view)) {
            std::memcpy(view.data, form_.data, form_.nbytes);
        }
        return array;
    }
    const auto release = memory_.get_deleter().is_warm ? release_warm : delete_bytes;
    std::byte* const memory = memory_.release();  // it is the array's, unless there is none
    nb::object array = array_over_memory(dtype, num_axes, shape, memory, release);
    if (!array.is_valid()) {
        memory_.reset(memory);
    }
    return array;
}

nb::object ReceivedArray::made_by_python() {
    const auto length = static_cast<std::ptrdiff_t>(form_.nbytes);
    return call_python_with(hooks().make_received, "OiOi", over(DType::uint8, 1, &length).ptr(),
                            static_cast<int>(form_.dtype), tuple_of(form_.num_axes, form_.shape).ptr(),
                            static_cast<int>(kind_));
}

// -- targets -----------------------------------------------------------------------------------------

bool ReceiveTarget::read(core::Request& receive, PyObject* out, PyObject* like, bool with_status) {
    with_status_ = receive.keeps_header = with_status;
    receive.takes_shorter = with_status && out != Py_None;
    if (out == Py_None && like == Py_None) {
        receive.place = &received_;
        return true;
    }
    is_known_ = true;
    if (like == Py_None) {
        if (!array_.read(out)) {
            return false;
        }
    } else {
        InputArray wanted;
        like_ = nb::borrow(like);
        const bool is_placed =
            wanted.read(like) && (out == Py_None ? array_.make(wanted, wanted.num_axes, wanted.shape)
                                                 : array_.read(out) && array_.dtype == wanted.dtype &&
                                                       array_.has_shape(wanted.num_axes, wanted.shape));
        if (!is_placed) {
            return false;
        }
    }
    const ArrayHeader header(array_, ArrayKind::none);
    receive.header.assign(header.form().begin(), header.form().end());
    receive.target = array_.data;
    receive.nbytes = array_.nbytes;
    return true;
}

bool ReceiveTarget::overlaps(const InputArray& x) const {
    return is_known_ && x.begin < array_.data + array_.nbytes && array_.data < x.end;
}

nb::object ReceiveTarget::finish(const core::Request& receive) {
    if (!with_status_) {
        return is_known_ ? array_.finish(like_.ptr()) : received_.finish();
    }
    ArrayView form;
    ArrayKind kind;
    read_header(receive.found, form, kind);  // the array was made by it, or compared with it
    const nb::object status = call_python_with(
        hooks().make_status, "iIiO", receive.found_source, static_cast<unsigned int>(receive.found_tag),
        static_cast<int>(form.dtype), tuple_of(form.num_axes, form.shape).ptr());
    return nb::make_tuple(is_known_ ? filled(form) : received_.finish(), status);
}

// The caller's array, or as many rows of it as have come.
nb::object ReceiveTarget::filled(const ArrayView& form) {
    nb::object array = array_.finish(like_.ptr());
    if (form.num_axes == 0 || form.shape[0] == array_.shape[0]) {
        return array;
    }
    return checked(PySequence_GetSlice(array.ptr(), 0, form.shape[0]));
}

}  // namespace ferrodist::bind
