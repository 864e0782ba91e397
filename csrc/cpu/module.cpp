// SPDX-License-Identifier: Apache-2.0
// commopt._cpu: the kernels for this processor. Addresses cross as integers, so that any torch will do.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels.hpp"

namespace py = pybind11;

namespace {

bool has_avx2() {
#ifdef COMMOPT_X86
    return __builtin_cpu_supports("avx2");
#else
    return false;
#endif
}

const Kernels* of_target(const std::string& target) {
#ifdef COMMOPT_X86
    if (target == "avx2" && has_avx2()) return &avx2_kernels;
#endif
    if (target == "baseline") return &baseline_kernels;
    throw std::invalid_argument("this processor has no kernels for " + target);
}

const Kernels* kernels = of_target(has_avx2() ? "avx2" : "baseline");

// What Python passes for a parameter.
template <typename T>
using Crossing = std::conditional_t<std::is_pointer_v<T>, std::uintptr_t, T>;

template <typename T>
T crossed(Crossing<T> value) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(value);
    } else {
        return value;
    }
}

// Other threads of Python go on meanwhile.
template <typename Result, typename... Parameters>
void define(py::module_& module, const char* name, Result (*Kernels::*kernel)(Parameters...)) {
    module.def(
        name,
        [kernel](Crossing<Parameters>... values) { return (kernels->*kernel)(crossed<Parameters>(values)...); },
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(_cpu, module) {
    module.def("target", [] { return kernels->target; });
    module.def("use", [](const std::string& target) { kernels = of_target(target); });  // for tests
    define(module, "lowrank_project", &Kernels::lowrank_project);
    define(module, "lowrank_refresh", &Kernels::lowrank_refresh);
    define(module, "lowrank_decode", &Kernels::lowrank_decode);
    define(module, "lowrank_begin", &Kernels::lowrank_begin);
    define(module, "lowrank_back", &Kernels::lowrank_back);
    define(module, "lowrank_finish", &Kernels::lowrank_finish);
    define(module, "orthogonalize", &Kernels::orthogonalize);
    define(module, "pack", &Kernels::pack);
    define(module, "unpack", &Kernels::unpack);
    define(module, "pack_difference", &Kernels::pack_difference);
    define(module, "unpack_difference", &Kernels::unpack_difference);
    define(module, "sum_bfloat16", &Kernels::sum_bfloat16);
    define(module, "encode", &Kernels::encode);
    define(module, "recode", &Kernels::recode);
    define(module, "decode", &Kernels::decode);
    define(module, "copy", &Kernels::copy);
    define(module, "sparse_select", &Kernels::sparse_select);
    define(module, "sparse_scatter", &Kernels::sparse_scatter);
    define(module, "sparse_sum", &Kernels::sparse_sum);
}
