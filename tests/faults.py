# SPDX-License-Identifier: Apache-2.0
"""Faults that the gate must find: one in each promise of docs/design.md and in each package (see mutants.py).

They are mistakes that a change could make, chosen by the promise and not by what a test looks at. A place must occur
once in its file (test_mutants.py). Whoever changes that code moves the fault along, or replaces it by one that breaks
the same promise.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of the one place in `file` where `before` stands; `tests`: names of the test files to run first."""

    name: str
    file: str
    before: str
    after: str
    promise: str
    tests: tuple[str, ...]


# As docs/design.md words them.
RIGHT = "right answer, to a stated tolerance, on every shape of world"
IDENTICAL = "replicas bit-identical"
DIFFERENCES = "replicas that differ are named, and no others"
NOTHING_LOST = "nothing is lost"
NON_FINITE = "non-finite values reach every rank, and change no residual"
FOLLOWS = "state follows the parameter"
NOBODY_HANGS = "nobody hangs"
NOT_DAMAGED = "nothing damaged is loaded"
LEGAL = "the returned tensor is legal"
ONE_MOMENT = "a state is of one moment, and asking for it changes no bit"
WHOLE_FILE = "a job that is killed at any byte of a save has the last whole file"
ACCOUNTING = "accounting"
MEMORY = "memory beside DDP's by the formula of the preset's docstring"
SAME_PLAN = "the same plan everywhere"
TORCHS_BITS = "FSDP2's modes leave torch's bits"
EQUAL_WEIGHTS = "all ranks compute with equal weights, none of them stale"
EXACT_WEIGHTS = "exact weights have FSDP's own bits, in no more bytes"
FOLLOWED = "a reader has the bits of a version that was written, or none"
ADAMW = "without compression, `adam=` is torch's AdamW"
FALLS_BEHIND = "`auto` leaves a strategy by which the model falls behind exact averages"
NEVER_SLOWER = "never slower in silence"
ASKED = "the store is asked as much of each rank in every world, and a bounded number a second"


FAULTS: tuple[Fault, ...] = (
    # ------------------------------------------------------------------------------------ checkpoints under way
    Fault(
        "a state holds the residuals themselves",
        "commopt/attached/snapshot.py",
        'return found.to("cpu", copy=True)',
        "return found",
        ONE_MOMENT,
        ("test_checkpoints_under_way",),
    ),
    Fault(
        "a step does not say that it is under way",
        "commopt/hooks/buckets.py",
        'self.boundary.begin("a backward")',
        "pass",
        ONE_MOMENT,
        ("test_checkpoints_under_way",),
    ),
    Fault(
        "a checkpoint has its name before it is written",
        "commopt/checkpoint_files.py",
        'unfinished = path.with_name(f"{path.name}.{os.getpid()}-{token_hex(4)}.unfinished")',
        "unfinished = path; path.unlink(missing_ok=True)",
        WHOLE_FILE,
        ("test_checkpoint_files",),
    ),
    Fault(
        "a checksum is written and not compared",
        "commopt/checkpoint_files.py",
        "if comment[len(_MARK) :] != found.hexdigest().encode():",
        "if False:",
        WHOLE_FILE,
        ("test_checkpoint_files",),
    ),
    # ------------------------------------------------------------------------------------ the right sum
    Fault(
        "gradients of uneven nodes are weighted by node",
        "commopt/aggregate/local_sgd.py",
        "self.gradients.all_reduce(buffer, team.intra, scale * team.size / team.intra.size, context)",
        "self.gradients.all_reduce(buffer, team.intra, scale * team.node_count, context)",
        RIGHT,
        ("test_local_sgd_training",),
    ),
    Fault(
        "a node's share is one over the nodes, also where nodes are uneven",
        "commopt/aggregate/hierarchical.py",
        "Levels(intra, inter, average, intra.size / team.size)",
        "Levels(intra, inter, average, 1 / team.node_count)",
        RIGHT,
        ("test_local_sgd_deltas", "test_adam"),
    ),
    Fault(
        "the scale is applied again between shards",
        "commopt/aggregate/hierarchical.py",
        "intra.reduce_scatter(shard, values if divided.in_place",
        "intra.reduce_scatter(shard, values.mul_(scale) if divided.in_place",
        RIGHT,
        ("test_contract_aggregators",),
    ),
    Fault(
        "a border is crossed by every node of a site",
        "commopt/groups/shape.py",
        'return 0 if self.level.endswith("intra") else len(self.wire.sites) - self.level.count("inter")',
        "return 0",
        ACCOUNTING,
        ("test_levels",),
    ),
    Fault(
        "every site keeps the whole residual of the way down",
        "commopt/aggregate/inside.py",
        "scale = torch.full((), float(sites),",
        "scale = torch.full((), 1.0,",
        NOTHING_LOST,
        ("test_levels",),
    ),
    Fault(
        "residuals stay on the nodes of a site that had them",
        "commopt/feedback/store.py",
        'if senders - {paths} or not any(f"{each}.".startswith(f"{path}.") for each in paths):',
        "if False:",
        NOTHING_LOST,
        ("test_handover", "test_levels"),
    ),
    Fault(
        "a broadcast leaves an uneven node at another place than it enters",
        "commopt/collectives/movement.py",
        "gate = src_place if cluster.uniform else 0",
        "gate = src_place",
        RIGHT,
        ("test_collectives",),
    ),
    Fault(
        "payloads are added up from the rank's own on",
        "commopt/aggregate/compressed.py",
        "region.compressor.accumulate(region.payload(received), total)",
        "region.compressor.accumulate(region.payload(received.roll(-team.rank, 0)), total)",
        IDENTICAL,
        ("test_contract_aggregators",),
    ),
    Fault(
        "a checksum does not know the order of numbers",
        "commopt/attached/checksum.py",
        "return numbers | 1",
        "return torch.ones_like(numbers)",
        DIFFERENCES,
        ("test_checksum",),
    ),
    Fault(
        "a rank that is behind in join() is compared with the others",
        "commopt/hooks/buckets.py",
        "self.divergence.compare(steps, device, takes_part=not shadowed)",
        "self.divergence.compare(steps, device)",
        DIFFERENCES,
        ("test_divergence",),
    ),
    Fault(
        "a later piece of a row is rounded by the random bits of the first",
        "commopt/kernels/residual.py",
        "sixteen_bits(place + begin, p.numel(), rng_key, p.device)",
        "sixteen_bits(place, p.numel(), rng_key, p.device)",
        "kernels: random bits are those of the element, wherever it is rounded",
        ("test_cast",),
    ),
    # ------------------------------------------------------------------------------------ what is left out
    Fault(
        "the residual has the wrong sign",
        "commopt/kernels/residual.py",
        "new = torch.sub(p, decoded, out=self._new[begin : begin + p.numel()])",
        "new = torch.sub(decoded, p, out=self._new[begin : begin + p.numel()])",
        NOTHING_LOST,
        ("test_compressors", "test_feedback_conservation"),
    ),
    Fault(
        "what the final cast takes away is not kept",
        "commopt/aggregate/compressed.py",
        "add_rounding_error(residual.new, exact, rows.dtype, residual.loss_scale)",
        "add_rounding_error(residual.new, exact, exact.dtype, residual.loss_scale)",
        NOTHING_LOST,
        ("test_feedback_conservation",),
    ),
    Fault(
        "what is left over when a part of it has moved is lost",
        "commopt/feedback/store.py",
        "self.add(path, each.layout.select([span]), each.values[slice(*span)])",
        "pass",
        NOTHING_LOST,
        ("test_handover", "test_feedback_moves"),
    ),
    Fault(
        "factors are committed only beside residuals",
        "commopt/feedback/transaction.py",
        "            if self._staged or self._staged_factors:\n",
        "            if self._staged:\n",
        NOTHING_LOST,
        ("test_powersgd",),
    ),
    Fault(
        "a step is committed without the lock",
        "commopt/feedback/transaction.py",
        "                with self.lock:\n                    self._commit()\n",
        "                self._commit()\n",
        NOTHING_LOST,
        ("test_handover",),
    ),
    Fault(
        "warm-up lasts a step longer than it says",
        "commopt/compress/dgc.py",
        "            if step < begin + steps:\n",
        "            if step <= begin + steps:\n",
        "compress: what is sent in which step",
        ("test_dgc",),
    ),
    Fault(
        "the fewest elements of a message are sent of each of its chunks",
        "commopt/compress/dgc.py",
        "return replace(self, min_elements=ceil(self.min_elements / chunks))",
        "return self",
        "compress: less than two sparse rows a node, however many there are",
        ("test_dgc",),
    ),
    Fault(
        "the nodes of a rack send through an uplink as one",
        "commopt/simulate/racks.py",
        "            return inside * (ranks - inside) / ranks\n",
        "            return (ranks - inside) / ranks\n",
        "simulate: a step on any cluster",
        ("test_simulate_racks",),
    ),
    Fault(
        "nothing beats stock DDP as soon as the trials are used up",
        "commopt/schedule/search.py",
        "all_tried=not hopeful",
        "all_tried=True",
        NEVER_SLOWER,
        ("test_search",),
    ),
    # ------------------------------------------------------------------------------------ non-finite values
    Fault(
        "a server judges the chunk it serves, and not those of the others",
        "commopt/aggregate/compressed.py",
        "_report_finite(rows, gathered, buffer, context)",
        "_report_finite(rows, served, buffer, context)",
        NON_FINITE,
        ("test_feedback_nonfinite",),
    ),
    Fault(
        "one finite region is enough",
        "commopt/aggregate/compressed.py",
        "finite = all_true(flags)",
        "finite = torch.stack(flags).any()",
        NON_FINITE,
        ("test_feedback_nonfinite",),
    ),
    # ------------------------------------------------------------------------------------ state
    Fault(
        "a server's residual is that of the next rank's chunk",
        "commopt/aggregate/compressed.py",
        "begin, end = region.chunk(team.rank)",
        "begin, end = region.chunk((team.rank + 1) % team.size)",
        FOLLOWS,
        ("test_feedback_state", "test_feedback_moves"),
    ),
    Fault(
        "residuals are shared out by the world that saved them",
        "commopt/feedback/checkpoint.py",
        "clamp(min=1) if is_average(path) else world_size",
        "clamp(min=1) if is_average(path) else len(ranks)",
        FOLLOWS,
        ("test_feedback_moves",),
    ),
    Fault(
        "after a resume the store counts steps from 0",
        "commopt/attached/registration.py",
        "        store.transaction.steps = self.steps = steps\n",
        "        self.steps = steps\n",
        FOLLOWS,
        ("test_feedback_moves",),
    ),
    Fault(
        "a second fit begins with what the first had loaded",
        "commopt/integrations/lightning.py",
        "            self._loaded = None\n",
        "",
        "integrations: each fit begins with what its checkpoint has, or with nothing",
        ("test_integrations_absent", "test_integrations_lightning"),
    ),
    Fault(
        "survivors of a failure begin with zeros in place of their residuals",
        "commopt/attached/rebuild.py",
        "                store.add(residual.path, residual.layout, residual.values.float())\n",
        "                store.add(residual.path, residual.layout, residual.values.float().zero_())\n",
        NOTHING_LOST,
        ("test_rebuild",),
    ),
    Fault(
        "what a backward that raised has staged is committed with the next step",
        "commopt/feedback/transaction.py",
        "            self._forget_staged()\n        self._under_way = True\n",
        "            pass\n        self._under_way = True\n",
        NOTHING_LOST,
        ("test_feedback_conservation", "test_feedback_state"),
    ),
    Fault(
        "a residual that is no number is loaded",
        "commopt/feedback/checkpoint.py",
        "if not (-largest <= least and most <= largest):",
        "if least < -largest or most > largest:",
        NOT_DAMAGED,
        ("test_feedback_damaged",),
    ),
    # ------------------------------------------------------------------------------------ nobody hangs
    Fault(
        "a seat of an earlier meeting counts",
        "commopt/groups/agreement.py",
        '            if seat.get("meeting") == meeting:\n',
        '            if "meeting" in seat:\n',
        NOBODY_HANGS,
        ("test_meetings",),
    ),
    Fault(
        "rank 0 asks for each seat by itself",
        "commopt/groups/agreement.py",
        "        texts = self._store.get_all([_seat(place) for place in taken])\n",
        "        texts = [self._store.get(_seat(place)) for place in taken]\n",
        ASKED,
        ("test_scale",),
    ),
    Fault(
        "a failure closes the groups of the model that failed alone",
        "commopt/lanes/failure.py",
        "affected = {membership, *(each for each in joined() if each.world == membership.world)}",
        "affected = {membership}",
        NOBODY_HANGS,
        ("test_failures",),
    ),
    Fault(
        "ranks are watched by the next ones of their own node",
        "commopt/lanes/heartbeat.py",
        "        places.append((seen.get(node, 0), node, rank))\n",
        "        places.append((0, 0, rank))\n",
        NOBODY_HANGS,
        ("test_heartbeat",),
    ),
    Fault(
        "a rank that has submitted a task counts as missing in it",
        "commopt/lanes/heartbeat.py",
        "if _submitted(beat, place) < place.sequence}",
        "if _submitted(beat, place) <= place.sequence}",
        NOBODY_HANGS,
        ("test_heartbeat",),
    ),
    Fault(
        "the side stream is recorded for the result alone",
        "commopt/lanes/stream.py",
        "                for tensor in tensors:\n",
        "                for tensor in tensors[:1]:\n",
        "lanes: memory is free once the lane is done with it",
        ("test_cuda_streams",),
    ),
    Fault(
        "the future resolves to a copy of the bucket",
        "commopt/lanes/lane.py",
        "self.ended.set_result(self._result)",
        "self.ended.set_result(self._result.clone())",
        LEGAL,
        ("test_lane_modes", "test_contract_aggregators"),
    ),
    Fault(
        "of two messages under way the later one ends first",
        "commopt/lanes/lane.py",
        "                self._end(under_way.popleft())\n",
        "                self._end(under_way.pop())\n",
        IDENTICAL,
        ("test_lane_overlap",),
    ),
    # ------------------------------------------------------------------------------------ accounting and plans
    Fault(
        "a sum to the leader is counted in 16 bits",
        "commopt/aggregate/hierarchical.py",
        'call(intra, "reduce", numel * summed.itemsize, place)',
        'call(intra, "reduce", numel * dtype.itemsize, place)',
        ACCOUNTING,
        ("test_cost_calls",),
    ),
    Fault(
        "plans of two strategies have one digest",
        "commopt/schedule/plan.py",
        'agreed = {"groups": self.groups, "strategy": self.strategy}',
        'agreed = {"groups": self.groups}',
        SAME_PLAN,
        ("test_plan",),
    ),
    Fault(
        "a group is ready with the first of its gradients",
        "commopt/schedule/planner.py",
        "np.maximum(finish[..., span], self._ready[j - 1])",
        "np.maximum(finish[..., span], self._ready[span])",
        "schedule: the best groups",
        ("test_plan_planner",),
    ),
    Fault(
        "a trial is measured in other buckets than its own",
        "commopt/schedule/search.py",
        "self._comparison.end_trial(measured if enough and measured.plan is self._plan else None)",
        "self._comparison.end_trial(measured if enough else None)",
        NEVER_SLOWER,
        ("test_search",),
    ),
    Fault(
        "auto compares nothing with exact averages",
        "commopt/hooks/buckets.py",
        "self.exact_sample = ExactSample() if self.controller.watches else None",
        "self.exact_sample = None",
        FALLS_BEHIND,
        ("test_guard",),
    ),
    Fault(
        "with a loss scale the guard takes residuals for smaller than they are",
        "commopt/attached/reduction.py",
        "        if kept is not None and loss_scale is not None:\n            kept *= loss_scale\n",
        "",
        FALLS_BEHIND,
        ("test_guard",),
    ),
    # ------------------------------------------------------------------------------------ FSDP2 and Adam
    Fault(
        "sums of replicas are divided",
        "commopt/sharded/registration.py",
        "scale=1.0 if group.sums else None,",
        "scale=None,",
        TORCHS_BITS,
        ("test_sharded_modes",),
    ),
    Fault(
        "a forward that backward repeats gathers anew",
        "commopt/sharded/one_dimension.py",
        "backward = seams.is_before_backward(group) or torch._C._current_graph_task_id() != -1",
        "backward = seams.is_before_backward(group)",
        EQUAL_WEIGHTS,
        ("test_sharded_1d",),
    ),
    Fault(
        "a rank's own row of the second copy stays behind",
        "commopt/sharded/exact.py",
        "                copy[rank].copy_(source)\n",
        "",
        EXACT_WEIGHTS,
        ("test_sharded_exact",),
    ),
    Fault(
        "the rest of a long message is not sent",
        "commopt/sharded/exact.py",
        "        if most > first:\n",
        "        if most > 2 * first:\n",
        EXACT_WEIGHTS,
        ("test_sharded_exact",),
    ),
    Fault(
        "a patch is applied to any weights of its number",
        "commopt/patches/reader.py",
        "if current is None or version.previous != current.state:",
        "if current is None:",
        FOLLOWED,
        ("test_patches",),
    ),
    Fault(
        "a writer whose storage failed goes on with a patch",
        "commopt/patches/writer.py",
        'previous, self._state = self._state, ""',
        "previous = self._state",
        FOLLOWED,
        ("test_patches",),
    ),
    Fault(
        "eps is not corrected as the second moment is",
        "commopt/aggregate/adam.py",
        "least = root * self.eps\n",
        "least = self.eps\n",
        ADAMW,
        ("test_adam",),
    ),
    Fault(
        "an element that rests is cleared in the sum of all and not in what the server keeps",
        "commopt/aggregate/compressed.py",
        "mask.clear(exact, region.chunk(team.rank)[0])",
        "pass",
        "what is zero on all ranks stays zero",
        ("test_zeros",),
    ),
    Fault(
        "what was touched before a sum came is forgotten where a message is of chunks",
        "commopt/aggregate/compressed.py",
        "mask.arrived(region.payload(gathered), region.chunk_numel, chunks=True)",
        "mask.arrived(region.payload(gathered), region.chunk_numel, chunks=False)",
        "what is zero on all ranks stays zero",
        ("test_zeros",),
    ),
    Fault(
        "a delta with infinite elements is taken for finite",
        "commopt/server/shared.py",
        "            if not math.isfinite(square):\n",
        "            if math.isnan(square):\n",
        "nothing that a worker or a stranger sends loses the server's model",
        ("test_server_hostile", "test_parameter_server"),
    ),
    # ------------------------------------------------------------------------------------ measuring and predicting
    Fault(
        "NaN is no wrong element",
        "commopt/bandwidth/collectives.py",
        "wrong += chunk.numel() - int((error <= _repeated(allowed, chunk.numel())).sum())",
        "wrong += int((error > _repeated(allowed, chunk.numel())).sum())",
        "bandwidth: wrong results are counted",
        ("test_bandwidth",),
    ),
    Fault(
        "a node sends at the rate it receives",
        "commopt/cluster/network.py",
        "return cls(_rate(send if slash else receive), _rate(receive), delay_us)",
        "return cls(_rate(receive), _rate(send if slash else receive), delay_us)",
        "cluster: links as asked for",
        ("test_cluster",),
    ),
    Fault(
        "nodes of another length are taken to share the links inside a node",
        "commopt/cost/pricing.py",
        '"intra": shape.ranks_per_node.count(team.size)',
        '"intra": shape.node_count',
        "cost: prices on any cluster",
        ("test_cost_pricing",),
    ),
    Fault(
        "a second measurement counts though the first was better",
        "commopt/probe/timing.py",
        "found[nbytes] = min(found[nbytes], take(nbytes), key=lambda each: each.time_us)",
        "found[nbytes] = take(nbytes)",
        "probe: what was disturbed is measured again",
        ("test_probe",),
    ),
    Fault(
        "a step begins with the last of its forwards",
        "commopt/recording/recorder.py",
        "        if self.enabled and self._forward_us is None:\n",
        "        if self.enabled:\n",
        "recording: what happened when",
        ("test_recording",),
    ),
    Fault(
        "what waits for stragglers is exposed too",
        "commopt/simulate/step.py",
        "exposed_us=step_us - slowest_us,",
        "exposed_us=step_us - compute_us,",
        "simulate: a step on any cluster",
        ("test_simulate_step",),
    ),
    Fault(
        "nodes that keep to themselves wait for each other",
        "commopt/timeline/recordings.py",
        "parts = nodes if _stays_inside(same) else [0] * len(nodes)",
        "parts = [0] * len(nodes)",
        "timeline: who waits for whom",
        ("test_timeline",),
    ),
    Fault(
        "a pair that met by itself counts as much as a whole group",
        "commopt/probe/nearness.py",
        "_DOUBT = 2 ",
        "_DOUBT = 0 ",
        "sites are found where they are, and nowhere else",
        ("test_probe_sites",),
    ),
    Fault(
        "compression that is to take no notice of sites goes site by site",
        "commopt/aggregate/hierarchical.py",
        "return _nested(self.inter, team.sites_above) if self.sites else self.inter",
        "return _nested(self.inter, team.sites_above)",
        "right answer, to a stated tolerance, on every shape of world",
        ("test_site_ways",),
    ),
    Fault(
        "a slow node is a site of its own",
        "commopt/probe/nearness.py",
        "        return gbps / max(min(self.best_gbps[node] for node in pair), 1e-12)\n",
        "        return gbps / max(max(self.best_gbps[node] for node in pair), 1e-12)\n",
        "sites are found where they are, and nowhere else",
        ("test_probe_sites",),
    ),
    Fault(
        "with sites told nobody times the other way",
        "commopt/schedule/config.py",
        "return team.sites_above > 0 and len(alternatives(aggregator, team)) > 1",
        "return False",
        NEVER_SLOWER,
        ("test_candidates",),
    ),
    # ------------------------------------------------------------------------------------ programs and machines
    Fault(
        "a worker that was struck may go on without its server",
        "commopt/chaos/asynchronous.py",
        "        if rank in fails and not mine.error and mine.status == 0:",
        "        if rank in fails and not mine.error and mine.status != 0:",
        "chaos: a wrong model is told",
        ("test_chaos_workers",),
    ),
    Fault(
        "without a compressor a push has no padding",
        "commopt/server/wire.py",
        "return torch.cat([payload, payload.new_zeros(missing)]) if missing else payload",
        "return payload",
        "server: the mean of deltas by what workers did",
        ("test_parameter_server",),
    ),
    Fault(
        "a rank that ends with other parameters has ended right",
        "commopt/chaos/judge.py",
        'return "" if mine == right else f"rank {rank} ends with other parameters',
        'return "" if mine else f"rank {rank} ends with other parameters',
        "chaos: a wrong model is told",
        ("test_chaos",),
    ),
    Fault(
        "a model that is evaluated first gets no hook",
        "commopt/run/models.py",
        " or not torch.is_grad_enabled():\n            return\n",
        ":\n            return\n        if not torch.is_grad_enabled():\n"
        "            self._known.add(model)\n            return\n",
        "run: every DDP model gets a hook",
        ("test_run_models",),
    ),
    Fault(
        "a rank's weight changes nothing",
        "commopt/attached/reduction.py",
        "scale * (weight or 1.0)",
        "scale",
        RIGHT,
        ("test_weight",),
    ),
    Fault(
        "a rank without samples sends what it has",
        "commopt/attached/reduction.py",
        "if weight == 0:",
        "if weight < 0:",
        RIGHT,
        ("test_weight",),
    ),
    Fault(
        "all workers weigh the same, however much they did",
        "commopt/server/shared.py",
        "delta.weight / total)",
        "1 / len(deltas))",
        "server: the mean of deltas by what workers did",
        ("test_parameter_server",),
    ),
    Fault(
        "a checkpoint of the server that is not finite is loaded",
        "commopt/server/shared.py",
        "is_floating_point() or not _is_finite(values):",
        "is_floating_point():",
        NOT_DAMAGED,
        ("test_parameter_server",),
    ),
    Fault(
        "addresses of routes are read in network order",
        "commopt/doctor/network.py",
        "to_bytes(4, sys.byteorder)",
        'to_bytes(4, "big")',
        "doctor: facts of the machine",
        ("test_doctor_checks",),
    ),
    Fault(
        "NVLinks that both ends list count twice",
        "topology/queries.py",
        "max(one_way.get((a, b), 0), one_way.get((b, a), 0))",
        "one_way.get((a, b), 0) + one_way.get((b, a), 0)",
        "topology: what the machines are",
        ("test_nvlink",),
    ),
    # ------------------------------------------------------------------------------------ memory
    Fault(
        "scratch memory stays as long as the first step's bucket",
        "commopt/attached/reduction.py",
        "store.scratch.clear()",
        "pass",
        MEMORY,
        ("test_memory",),
    ),
    Fault(
        "memory is not let go at the end of a frame",
        "commopt/feedback/scratch.py",
        "self._number, self._end, self._used, self._tags = self._frames.pop()",
        "self._frames.pop()",
        MEMORY,
        ("test_memory",),
    ),
    # ------------------------------------------------------------------------------------ kernels
    Fault(
        "an aligned block moves as whole vectors, whatever its length",
        "csrc/team.cuh",
        "return misalignment<WIDTH>(block) == 0 && present % WIDTH == 0;",
        "return misalignment<WIDTH>(block) == 0;",
        "csrc: the tail of a block",
        ("test_kernels",),
    ),
    Fault(
        "the gap behind an odd number of indices keeps what memory held",
        "csrc/sparse_rows.cuh",
        "        if (entries % 2 == 1) indices()[entries] = 0;\n",
        "",
        "csrc: every byte of a row is written",
        ("test_kernels",),
    ),
    Fault(
        "a block of small exponents has another base than with plain torch",
        "csrc/cpu/packing.hpp",
        "std::max<int>(largest, ELSEWHERE - 1)",
        "std::max<int>(largest, ELSEWHERE)",
        "csrc/cpu: the reference's bits",
        ("test_packed", "test_cpu_kernels"),
    ),
    Fault(
        "a difference of 16 bits loses its highest",
        "csrc/cpu/differences.hpp",
        "widths[at] = std::min<std::uint16_t>(width, 16);",
        "widths[at] = std::min<std::uint16_t>(width, 15);",
        "csrc/cpu: the reference's bits",
        ("test_differences",),
    ),
)
