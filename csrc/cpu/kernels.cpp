// SPDX-License-Identifier: Apache-2.0
// Compiled once for every kind of processor: COMMOPT_TARGET names it.
#include "kernels.hpp"

#include "blocks.hpp"
#include "differences.hpp"
#include "factors.hpp"
#include "lowrank.hpp"
#include "packing.hpp"
#include "sparse.hpp"
#include "sums.hpp"

#define NAME_OF(target) #target
#define TEXT(target) NAME_OF(target)
#define JOINED(one, other) one##other
#define TABLE(target) JOINED(target, _kernels)

#define KERNEL(name) COMMOPT_TARGET::name

const Kernels TABLE(COMMOPT_TARGET) = {
    TEXT(COMMOPT_TARGET),   KERNEL(lowrank_project), KERNEL(lowrank_refresh), KERNEL(lowrank_decode),
    KERNEL(lowrank_begin),  KERNEL(lowrank_back),    KERNEL(lowrank_finish),  KERNEL(orthogonalize),
    KERNEL(pack),           KERNEL(unpack),          KERNEL(pack_difference), KERNEL(unpack_difference),
    KERNEL(sum_bfloat16),   KERNEL(encode),          KERNEL(recode),          KERNEL(decode),
    KERNEL(copy),           KERNEL(sparse_select),   KERNEL(sparse_scatter),  KERNEL(sparse_sum),
};
