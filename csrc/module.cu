// SPDX-License-Identifier: Apache-2.0
// The one host file: a table of the kernels and one launch function for all of them.
//
// Pointers and streams cross as integers, so the module depends on no other library's binary interface.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cast.cuh"
#include "commit.cuh"
#include "dequantize.cuh"
#include "factors.cuh"
#include "lowrank.cuh"
#include "quantize.cuh"
#include "requantize.cuh"
#include "sparse_accumulate.cuh"
#include "sparse_decode.cuh"
#include "sparse_select.cuh"
#include "sparse_write.cuh"

namespace py = pybind11;

namespace {

struct Kernel {
    const void* entry;
    std::vector<bool> is_real;   // per parameter: a double, else an integer or an address
};

template <typename... Parameters>
Kernel describe(void (*entry)(Parameters...)) {
    static_assert(((sizeof(Parameters) == 8) && ...), "every kernel parameter is 8 bytes wide");
    return {reinterpret_cast<const void*>(entry), {std::is_floating_point_v<Parameters>...}};
}

#define KERNEL(name) {#name, describe(name)}

const std::map<std::string, Kernel>& kernels() {
    static const std::map<std::string, Kernel> table = {
        KERNEL(encode_uniform8), KERNEL(encode_uniform4), KERNEL(encode_uniform2), KERNEL(encode_companded4),
        KERNEL(encode_centroids2), KERNEL(encode_sign_mean), KERNEL(encode_sign_rms),
        KERNEL(encode_uniform8_stochastic), KERNEL(encode_uniform4_stochastic), KERNEL(encode_uniform2_stochastic),
        KERNEL(decode_uniform8), KERNEL(decode_uniform4), KERNEL(decode_uniform2), KERNEL(decode_companded4),
        KERNEL(decode_centroids2), KERNEL(decode_sign),
        KERNEL(recode_uniform8), KERNEL(recode_uniform4), KERNEL(recode_uniform2), KERNEL(recode_companded4),
        KERNEL(recode_centroids2), KERNEL(recode_sign_mean), KERNEL(recode_sign_rms),
        KERNEL(recode_uniform8_stochastic), KERNEL(recode_uniform4_stochastic), KERNEL(recode_uniform2_stochastic),
        KERNEL(cast_stochastic), KERNEL(sparse_accumulate), KERNEL(sparse_threshold), KERNEL(sparse_collect),
        KERNEL(sparse_histogram), KERNEL(sparse_count), KERNEL(sparse_offsets), KERNEL(sparse_write),
        KERNEL(sparse_decode),
        KERNEL(factor_absmax), KERNEL(factor_gram), KERNEL(factor_solve),
        KERNEL(lowrank_decode), KERNEL(lowrank_project), KERNEL(lowrank_subtract),
        KERNEL(lowrank_decode_all), KERNEL(lowrank_subtract_all), KERNEL(lowrank_begin), KERNEL(commit),
    };
    return table;
}

#undef KERNEL

union Slot {
    std::int64_t integer;
    double real;
};

std::vector<Slot> slots_of(const std::string& name, const Kernel& kernel, const py::tuple& arguments) {
    if (arguments.size() != kernel.is_real.size()) {
        throw py::type_error("kernel " + name + " takes " + std::to_string(kernel.is_real.size()) + " arguments, got " +
                             std::to_string(arguments.size()));
    }
    std::vector<Slot> slots(arguments.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const py::handle argument = arguments[i];
        const bool fits = kernel.is_real[i] ? py::isinstance<py::float_>(argument) : py::isinstance<py::int_>(argument);
        if (!fits) {
            throw py::type_error("kernel " + name + ": argument " + std::to_string(i) + " must be " +
                                 (kernel.is_real[i] ? "a float" : "an int"));
        }
        if (kernel.is_real[i]) {
            slots[i].real = argument.cast<double>();
        } else {
            slots[i].integer = argument.cast<std::int64_t>();
        }
    }
    return slots;
}

void launch(const std::string& name, unsigned int grid, unsigned int block, std::uintptr_t stream,
            const py::tuple& arguments) {
    const auto found = kernels().find(name);
    if (found == kernels().end()) throw py::key_error("no kernel is named " + name);
    std::vector<Slot> slots = slots_of(name, found->second, arguments);
    std::vector<void*> addresses;
    for (Slot& slot : slots) addresses.push_back(&slot);
    const cudaError_t status = cudaLaunchKernel(found->second.entry, dim3(grid), dim3(block), addresses.data(), 0,
                                                reinterpret_cast<cudaStream_t>(stream));
    if (status != cudaSuccess) {
        throw std::runtime_error("launch of kernel " + name + " (grid " + std::to_string(grid) + ", block " +
                                 std::to_string(block) + ") failed: " + cudaGetErrorString(status));
    }
}

}   // namespace

PYBIND11_MODULE(_C, module) {
    module.doc() = "Kernels compiled ahead of time.";
    module.def(
        "names",
        [] {
            std::vector<std::string> names;
            for (const auto& [name, kernel] : kernels()) names.push_back(name);
            return names;
        },
        "List every kernel.");
    module.def("launch", &launch, py::arg("name"), py::arg("grid"), py::arg("block"), py::arg("stream"),
               py::arg("arguments"), "Launch a kernel on a stream of the current device.");
}
