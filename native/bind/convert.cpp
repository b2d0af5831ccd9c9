// SPDX-License-Identifier: MIT OR Apache-2.0
#include "bind/convert.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "bind/hooks.hpp"
#include "core/memory.hpp"

namespace nb = nanobind;

namespace ferrodist::bind {

// A type of arrays that another library makes: torch's have a DLPack table, or a function that makes capsules
// in older releases; others are adapted: read through a buffer or __dlpack__, and made of a NumPy array.
struct RegisteredType {
    const dlpack::ExchangeTable* table = nullptr;
    nb::object to_capsule, is_neg, is_conj, requires_grad, is_leaf, empty, empty_like, device, increment_version;
    nb::object from_numpy;  // (input, array) -> the result; invalid for torch
    ArrayKind sent_kind = ArrayKind::torch;
};

namespace {

using Registry = std::unordered_map<PyTypeObject*, RegisteredType>;

// Never destroyed: the interpreter may be gone by then.
Registry& registry() {
    static auto* const types = new Registry;
    return *types;
}

// An array is mostly of the type of the one before. Entries stay where they are; the GIL guards all of it.
const RegisteredType* find_type(PyTypeObject* type) {
    static PyTypeObject* last = nullptr;
    static const RegisteredType* of_last = nullptr;
    if (type != last) {
        const auto found = registry().find(type);
        if (found == registry().end()) {
            return nullptr;
        }
        last = type;
        of_last = &found->second;
    }
    return of_last;
}

// Codes of DLPack, in the order of DType; the size of an element says the rest.
constexpr std::uint8_t codes[num_array_dtypes] = {
    dlpack::code_bool,  dlpack::code_int,    dlpack::code_int,   dlpack::code_int,   dlpack::code_int,
    dlpack::code_uint,  dlpack::code_uint,   dlpack::code_uint,  dlpack::code_uint,  dlpack::code_float,
    dlpack::code_bfloat, dlpack::code_float, dlpack::code_float, dlpack::code_complex, dlpack::code_complex};

std::optional<DType> dtype_of(const dlpack::Tensor& tensor) {
    for (std::size_t number = 0; number < num_array_dtypes && tensor.lanes == 1; ++number) {
        const auto dtype = static_cast<DType>(number);
        if (codes[number] == tensor.code && 8 * item_size(dtype) == tensor.bits) {
            return dtype;
        }
    }
    return std::nullopt;
}

bool is_complex(DType dtype) { return dtype == DType::complex64 || dtype == DType::complex128; }

// Native code may load whole elements.
bool is_aligned(const std::byte* data, DType dtype) {
    const std::size_t unit = is_complex(dtype) ? item_size(dtype) / 2 : item_size(dtype);
    return reinterpret_cast<std::uintptr_t>(data) % unit == 0;
}

bool is_contiguous(const dlpack::Tensor& tensor) {
    std::int64_t expected = 1;
    for (int axis = tensor.num_axes; tensor.strides != nullptr && axis-- > 0;) {
        if (tensor.shape[axis] != 1 && tensor.strides[axis] != expected) {
            return false;
        }
        expected *= tensor.shape[axis];
    }
    return true;
}

void set_size(ArrayView& view) {
    view.nbytes = item_size(view.dtype);
    for (int axis = 0; axis < view.num_axes; ++axis) {
        view.nbytes *= static_cast<std::size_t>(view.shape[axis]);
    }
}

// Dtype, shape and address of a tensor in CPU memory, strided or not; false for what it cannot be.
bool show(ArrayView& view, const dlpack::Tensor& tensor) {
    const auto dtype = dtype_of(tensor);
    if (!dtype || tensor.device_type != dlpack::device_cpu || tensor.num_axes < 0 || tensor.num_axes > max_axes) {
        return false;
    }
    view.dtype = *dtype;
    view.num_axes = tensor.num_axes;
    std::copy(tensor.shape, tensor.shape + tensor.num_axes, view.shape);
    set_size(view);
    view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
    return tensor.data != nullptr || view.nbytes == 0;  // fake and traced tensors have no memory
}

// The answer of a method like Tensor.is_neg; true also if it fails: the general path finds out why.
bool says_yes(const nb::object& method, PyObject* object) {
    const nb::object answer = nb::steal(PyObject_CallOneArg(method.ptr(), object));
    PyErr_Clear();
    return !answer.is_valid() || answer.ptr() == Py_True;
}

// The table gives the raw pointer of views that are conjugated or negated when they are read.
bool is_lazy_view(const RegisteredType& type, PyObject* tensor, DType dtype) {
    return says_yes(type.is_neg, tensor) || (is_complex(dtype) && says_yes(type.is_conj, tensor));
}

// Through the descriptor of a flag like Tensor.requires_grad, so that nothing is looked up by name.
bool has_flag(PyObject* tensor, const nb::object& flag) {
    const nb::object value = nb::steal(Py_TYPE(flag.ptr())->tp_descr_get(flag.ptr(), tensor, nullptr));
    PyErr_Clear();
    return value.is_valid() && value.ptr() == Py_True;
}

// The tensor behind an object of a registered type, by its table or its capsule.
const dlpack::Tensor* tensor_of(const RegisteredType& type, PyObject* object, dlpack::Tensor& room, Borrowed& borrowed) {
    if (type.table != nullptr) {
        const bool is_there = type.table->tensor_from_object(object, &room) == 0;
        PyErr_Clear();
        return is_there ? &room : nullptr;
    }
    const nb::object capsule = nb::steal(PyObject_CallOneArg(type.to_capsule.ptr(), object));
    const dlpack::Tensor* tensor = capsule.is_valid() ? borrowed.take(capsule.ptr()) : nullptr;
    PyErr_Clear();
    return tensor;
}

// Copies the elements behind an axis and all after it, each next to the one before.
void pack_axis(std::byte*& into, const std::byte* from, const ArrayView& view, const std::ptrdiff_t* strides, int axis) {
    const std::size_t size = item_size(view.dtype);
    if (axis == view.num_axes) {
        std::memcpy(into, from, size);
        into += size;
        return;
    }
    for (std::ptrdiff_t i = 0; i < view.shape[axis]; ++i, from += strides[axis]) {
        pack_axis(into, from, view, strides, axis + 1);
    }
}

// Lends warm memory to another library, with the shape it asks for beside it.
struct WarmTensor {
    dlpack::ManagedVersioned managed;
    std::int64_t shape[max_axes], strides[max_axes];
};

dlpack::ManagedVersioned* new_warm_tensor(const ArrayView& view) {
    auto warm = std::make_unique<WarmTensor>();
    std::int64_t stride = 1;
    for (int axis = view.num_axes; axis-- > 0;) {
        warm->shape[axis] = view.shape[axis];
        warm->strides[axis] = stride;
        stride *= view.shape[axis];
    }
    dlpack::Tensor& tensor = warm->managed.tensor;
    tensor = {take_warm(view.nbytes), dlpack::device_cpu, 0, view.num_axes, codes[static_cast<std::size_t>(view.dtype)],
              static_cast<std::uint8_t>(8 * item_size(view.dtype)), 1, warm->shape, warm->strides, 0};
    warm->managed.version = {dlpack::major_version, 0};
    warm->managed.context = warm.get();
    warm->managed.deleter = [](dlpack::ManagedVersioned* managed) {
        release_warm(managed->tensor.data);
        delete static_cast<WarmTensor*>(managed->context);
    };
    return &warm.release()->managed;
}

// The kind of what exports a buffer and is no array of a library; none if it is something else.
ArrayKind kind_of_exporter(PyObject* object) {
    if (PyBytes_CheckExact(object)) {
        return ArrayKind::bytes;
    }
    if (PyByteArray_CheckExact(object)) {
        return ArrayKind::bytearray;
    }
    static PyTypeObject* const array_type =
        reinterpret_cast<PyTypeObject*>(nb::module_::import_("array").attr("array").inc_ref().ptr());
    if (Py_TYPE(object) == array_type) {
        return ArrayKind::python_array;
    }
    const bool is_exporter = PyMemoryView_Check(object) ||
                             (PyObject_CheckBuffer(object) && !PyObject_HasAttrString(object, "__dlpack__") &&
                              !PyObject_HasAttrString(object, "__array__"));
    return is_exporter && !PyType_Check(object) ? ArrayKind::memory : ArrayKind::none;
}

}  // namespace

namespace {

template <class T>
T load(const std::byte* data) {
    T value;
    std::memcpy(&value, data, sizeof value);
    return value;
}

}  // namespace

nb::object number_of(const std::byte* data, DType dtype) {
    switch (dtype) {
        case DType::boolean: return nb::steal(PyBool_FromLong(*data != std::byte{0}));
        case DType::int64: return nb::steal(PyLong_FromLongLong(load<std::int64_t>(data)));
        case DType::float64: return nb::steal(PyFloat_FromDouble(load<double>(data)));
        default: return nb::steal(PyComplex_FromCComplex(load<Py_complex>(data)));
    }
}

Borrowed::~Borrowed() {
    if (managed_ != nullptr && managed_->deleter != nullptr) {
        managed_->deleter(managed_);
    }
    if (versioned_ != nullptr && versioned_->deleter != nullptr) {
        versioned_->deleter(versioned_);
    }
}

const dlpack::Tensor* Borrowed::take(PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        versioned_ = static_cast<dlpack::ManagedVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
        PyCapsule_SetName(capsule, "used_dltensor_versioned");
        return versioned_->version.major == dlpack::major_version ? &versioned_->tensor : nullptr;
    }
    if (!PyCapsule_IsValid(capsule, "dltensor")) {
        return nullptr;
    }
    managed_ = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule, "dltensor"));
    PyCapsule_SetName(capsule, "used_dltensor");
    return &managed_->tensor;
}

// -- in ------------------------------------------------------------------------------------------

bool InputArray::read(PyObject* array) {
    object = array;
    if (read_numpy(array)) {
        kind = ArrayKind::numpy;
        return true;
    }
    if (PyFloat_CheckExact(array) || PyLong_CheckExact(array) || PyBool_Check(array) || PyComplex_CheckExact(array)) {
        kind = ArrayKind::number;
        return read_number();
    }
    type = find_type(Py_TYPE(array));
    if (type != nullptr) {
        kind = type->from_numpy.is_valid() ? ArrayKind::adapted : ArrayKind::torch;
        return kind == ArrayKind::torch ? read_torch() : read_buffer() || read_dlpack();
    }
    if (is_numpy_scalar(array)) {
        kind = ArrayKind::numpy_scalar;
        return (owner_ = array_of_scalar(array)).is_valid() && read_numpy(owner_.ptr());
    }
    kind = kind_of_exporter(array);
    return kind != ArrayKind::none && read_buffer();
}

ArrayKind InputArray::sent_kind() const { return kind == ArrayKind::adapted ? type->sent_kind : kind; }

bool InputArray::read_numpy(PyObject* array) {
    if (view_plain_array(array, *this)) {
        begin = data;
        end = data + nbytes;
        return true;
    }
    owner_ = packed_copy(array, begin, end);
    return owner_.is_valid() && view_plain_array(owner_.ptr(), *this);
}

bool InputArray::read_number() {
    const auto set = [this](DType its_dtype, const auto& value) {
        dtype = its_dtype;
        nbytes = sizeof value;
        std::memcpy(number_, &value, sizeof value);
    };
    data = number_;
    num_axes = 0;
    if (PyBool_Check(object)) {
        set(DType::boolean, object == Py_True);
    } else if (PyLong_CheckExact(object)) {
        int overflow = 0;
        set(DType::int64, PyLong_AsLongLongAndOverflow(object, &overflow));
        return overflow == 0;
    } else if (PyFloat_CheckExact(object)) {
        set(DType::float64, PyFloat_AS_DOUBLE(object));
    } else {
        set(DType::complex128, PyComplex_AsCComplex(object));
    }
    return true;
}

bool InputArray::read_torch() {
    dlpack::Tensor room;
    const dlpack::Tensor* tensor = tensor_of(*type, object, room, borrowed_);
    return tensor != nullptr && view(*tensor) && !is_lazy_view(*type, object, dtype);
}

// Through NumPy, which knows formats and strides, and lets go of the exporter with the array.
bool InputArray::read_buffer() {
    nb::object array = array_over_buffer(object);
    if (!array.is_valid() || !read_numpy(array.ptr())) {
        return false;
    }
    if (!owner_.is_valid()) {  // else it is packed, and the array is not needed any more
        owner_ = std::move(array);
    }
    return true;
}

bool InputArray::read_dlpack() {
    static PyObject* const names = Py_BuildValue("(s)", "max_version");
    static PyObject* const version = Py_BuildValue("(ii)", 1, 0);
    static PyObject* const method = PyUnicode_InternFromString("__dlpack__");
    PyObject* const arguments[] = {object, version};
    nb::object capsule = nb::steal(in_python([&] { return PyObject_VectorcallMethod(method, arguments, 1, names); }));
    if (!capsule.is_valid()) {  // of a library that knows no versions, and no read-only arrays
        PyErr_Clear();
        capsule = nb::steal(in_python([&] { return PyObject_CallMethodNoArgs(object, method); }));
    }
    PyErr_Clear();
    const dlpack::Tensor* tensor = capsule.is_valid() ? borrowed_.take(capsule.ptr()) : nullptr;
    return tensor != nullptr && view(*tensor);
}

bool InputArray::view(const dlpack::Tensor& tensor) {
    if (!show(*this, tensor)) {
        return false;
    }
    begin = end = data;
    if (nbytes == 0) {
        return true;
    }
    if (is_contiguous(tensor) && is_aligned(data, dtype)) {
        end += nbytes;
        return true;
    }
    std::ptrdiff_t strides[max_axes];
    std::ptrdiff_t contiguous = 1;
    for (int axis = num_axes; axis-- > 0;) {
        strides[axis] = tensor.strides == nullptr ? contiguous : tensor.strides[axis];
        contiguous *= shape[axis];
        strides[axis] *= static_cast<std::ptrdiff_t>(item_size(dtype));
        (strides[axis] < 0 ? begin : end) += strides[axis] * (shape[axis] - 1);
    }
    end += item_size(dtype);
    return pack(strides);
}

bool InputArray::pack(const std::ptrdiff_t* strides) {
    try {
        packed_ = std::make_unique_for_overwrite<std::byte[]>(nbytes);
    } catch (const std::bad_alloc&) {
        throw core::OutOfMemory(nbytes);
    }
    std::byte* into = packed_.get();
    pack_axis(into, data, *this, strides, 0);
    data = packed_.get();
    return true;
}

// -- out -----------------------------------------------------------------------------------------

bool OutputArray::read(PyObject* out) {
    owner_ = nb::borrow(out);
    is_out_ = true;
    if (bool is_writable = false; view_plain_array(out, *this, &is_writable)) {
        kind_ = ArrayKind::numpy;
        return is_writable;
    }
    type_ = find_type(Py_TYPE(out));
    if (type_ == nullptr || type_->from_numpy.is_valid()) {
        return false;
    }
    kind_ = ArrayKind::torch;
    return read_torch() && !is_lazy_view(*type_, out, dtype) &&
           (!has_flag(out, type_->requires_grad) || has_flag(out, type_->is_leaf));
}

// Only memory that is one piece; a capsule may be given back at once, for the tensor itself is kept.
bool OutputArray::read_torch() {
    dlpack::Tensor room;
    Borrowed borrowed;
    const dlpack::Tensor* tensor = tensor_of(*type_, owner_.ptr(), room, borrowed);
    return tensor != nullptr && show(*this, *tensor) &&
           (nbytes == 0 || (is_contiguous(*tensor) && is_aligned(data, dtype)));
}

bool OutputArray::show_numpy(nb::object array) {
    owner_ = std::move(array);
    return owner_.is_valid() && view_plain_array(owner_.ptr(), *this);
}

bool OutputArray::make_numpy(DType wanted, int axes, const std::ptrdiff_t* lengths) {
    kind_ = ArrayKind::numpy;
    return show_numpy(new_array_of(wanted, axes, lengths));
}

bool OutputArray::make(const InputArray& like, int axes, const std::ptrdiff_t* lengths) {
    kind_ = like.kind;
    type_ = like.type;
    switch (like.kind) {
        case ArrayKind::numpy: return show_numpy(new_array_like(like.object, axes, lengths));
        case ArrayKind::torch: return make_torch(like, axes, lengths);
        case ArrayKind::number:
            if (axes > 0) {
                return make_numpy(like.dtype, axes, lengths);
            }
            data = number_;
            dtype = like.dtype;
            num_axes = 0;
            nbytes = like.nbytes;
            return true;
        case ArrayKind::bytes:
        case ArrayKind::bytearray: {
            const auto length = static_cast<Py_ssize_t>(lengths[0]);
            const bool is_bytes = like.kind == ArrayKind::bytes;
            owner_ = checked(is_bytes ? PyBytes_FromStringAndSize(nullptr, length)
                                      : PyByteArray_FromStringAndSize(nullptr, length));
            data = reinterpret_cast<std::byte*>(is_bytes ? PyBytes_AS_STRING(owner_.ptr())
                                                         : PyByteArray_AS_STRING(owner_.ptr()));
            dtype = DType::uint8;
            num_axes = axes;
            shape[0] = lengths[0];
            nbytes = static_cast<std::size_t>(length);
            return true;
        }
        default: return show_numpy(new_array_of(like.dtype, axes, lengths));
    }
}

bool OutputArray::make_torch(const InputArray& like, int axes, const std::ptrdiff_t* lengths) {
    num_axes = axes;
    std::copy(lengths, lengths + axes, shape);
    dtype = like.dtype;
    set_size(*this);
    if (nbytes >= smallest_warm && type_->table != nullptr) {
        void* tensor = nullptr;
        if (type_->table->object_from_managed(new_warm_tensor(*this), &tensor) != 0) {
            throw nb::python_error();
        }
        owner_ = nb::steal(static_cast<PyObject*>(tensor));
        return read_torch();
    }
    // A tensor of torch's own can be resized, as users of small ones may want.
    if (like.begin == like.data && like.has_shape(axes, lengths)) {
        owner_ = checked(PyObject_CallOneArg(type_->empty_like.ptr(), like.object));
    } else {
        static PyObject* const names = Py_BuildValue("(ss)", "dtype", "device");
        const nb::object size = tuple_of(axes, lengths);
        static PyObject* const name = PyUnicode_InternFromString("dtype");
        const nb::object its_dtype = nb::steal(PyObject_GetAttr(like.object, name));
        PyObject* const arguments[] = {size.ptr(), its_dtype.ptr(), type_->device.ptr()};
        owner_ = checked(PyObject_Vectorcall(type_->empty.ptr(), arguments, 1, names));
    }
    return find_type(Py_TYPE(owner_.ptr())) != nullptr && read_torch();
}

nb::object OutputArray::finish(PyObject* input) {
    if (is_out_) {
        if (kind_ == ArrayKind::torch) {  // else a backward pass that saved the old values would use the new ones
            const nb::object changed = checked(PyTuple_Pack(1, owner_.ptr()));
            checked(PyObject_CallOneArg(type_->increment_version.ptr(), changed.ptr()));
        }
        return owner_;
    }
    switch (kind_) {
        case ArrayKind::number: return num_axes == 0 ? number_of(data, dtype) : owner_;
        case ArrayKind::numpy_scalar: return num_axes == 0 ? scalar_of(owner_.ptr()) : owner_;
        case ArrayKind::adapted: return type_->from_numpy(nb::handle(input), owner_);
        case ArrayKind::memory: return nb::steal(PyMemoryView_FromObject(owner_.ptr()));
        case ArrayKind::python_array: {
            const nb::object code = nb::steal(PyObject_GetAttrString(input, "typecode"));
            const nb::object bytes = nb::bytes(reinterpret_cast<const char*>(data), nbytes);
            return nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(input)))(code, bytes);
        }
        default: return owner_;
    }
}

// -- registering ---------------------------------------------------------------------------------

namespace {

void register_torch(nb::handle torch, nb::handle table) {
    const dlpack::ExchangeTable* known = nullptr;
    if (!table.is_none()) {
        known = static_cast<const dlpack::ExchangeTable*>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api"));
        while (known != nullptr && known->version.major != dlpack::major_version) {
            known = known->previous;
        }
        PyErr_Clear();
        if (known != nullptr && (known->tensor_from_object == nullptr || known->object_from_managed == nullptr)) {
            known = nullptr;
        }
    }
    const nb::object tensor = torch.attr("Tensor"), native = torch.attr("_C");
    const nb::object increment_version = table.is_none()  // older torch has none
                                             ? nb::object(torch.attr("autograd").attr("graph").attr("increment_version"))
                                             : nb::object(native.attr("_increment_version"));
    for (nb::object type : {tensor, nb::object(torch.attr("nn").attr("Parameter"))}) {
        registry()[reinterpret_cast<PyTypeObject*>(type.release().ptr())] = {
            known, native.attr("_to_dlpack"), tensor.attr("is_neg"), tensor.attr("is_conj"), tensor.attr("requires_grad"),
            tensor.attr("is_leaf"), torch.attr("empty"), torch.attr("empty_like"), torch.attr("device")("cpu"),
            increment_version, {}, ArrayKind::torch};
    }
}

void register_adapted(nb::handle type, nb::object from_numpy, std::uint8_t sent_kind) {
    RegisteredType& registered = registry()[reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr())];
    registered.from_numpy = std::move(from_numpy);
    registered.sent_kind = static_cast<ArrayKind>(sent_kind);
}

}  // namespace

void add_convert(nb::module_& module) {
    using namespace nb::literals;
    module.def("register_torch", &register_torch, "torch"_a, "table"_a.none(),
               "Let native code convert tensors of exactly torch.Tensor and torch.nn.Parameter.");
    module.def("register_adapted", &register_adapted, "kind"_a, "from_numpy"_a, "sent_kind"_a,
               "Let native code read arrays of exactly this type; from_numpy(x, array) makes its results.");
}

}  // namespace ferrodist::bind
