# SPDX-License-Identifier: Apache-2.0
"""Which test holds which promise of docs/design.md, for a strategy of every kind, and what README.md promises beside.

All of `PROMISES` runs in `make test`. `GATE` are the slow tests that the gate runs too.
"""

from __future__ import annotations

from collections.abc import Mapping

# One strategy of every kind.
KINDS: dict[str, str] = {
    "flat": "flat",
    "hierarchical": "hierarchical",
    "cast": "hierarchical_bf16",
    "quantized": "hierarchical_quantized:bits=4",
    "onebit": "hierarchical_onebit",
    "dgc": "hierarchical_dgc",
    "powersgd": "hierarchical_powersgd",
    "local_sgd": "",  # no preset: an aggregator of its own
    "auto": "auto",
}
LOSSY = ("cast", "quantized", "onebit", "dgc", "powersgd")
PRESETS_WITHOUT_AUTO = ("flat", "hierarchical", *LOSSY)

_EVERY = "test_promises.py::"
_CONTRACT = "test_contract_aggregators.py::"
_LAYOUTS = ("2", "2x2", "2+1")
_CONSERVATION = "test_feedback_conservation.py::test_nothing_is_lost"
_NOT_FINITE = "test_feedback_nonfinite.py::test_without_a_scaler_each_bucket_is_dropped_by_itself"
_RESUMING = "test_feedback_state.py::test_resuming_changes_no_bit"
_DAMAGED = "test_feedback_damaged.py::"
_ZEROS = "test_zeros.py::"
_LOCAL_SGD = "test_local_sgd_training.py::"
_DELTAS = "test_local_sgd_deltas.py::"
_FEATURE = "test_hook_ddp_features.py::test_feature_of_ddp"
_CLUSTERS = "test_hook_ddp_features.py::test_other_clusters"
_PLANS = "test_hook_plans.py::test_gradients_stay_right_while_plans_change"
_MODES = "test_sharded_modes.py::test_mode"
_HOSTILE = "test_server_hostile.py::"
_COUNTED = "test_wire_bytes.py::test_promised_bytes_are_sent"
_CONNECTIONS = "test_connections.py::"
_MEMORY = "test_memory.py::test_no_preset_needs_more_than_its_docstring_says"


def _preset(kind: str) -> str:
    return KINDS[kind].partition(":")[0]


def _all(kinds: tuple[str, ...], *tests: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(kinds, tests)


# By the promise, as the page words it, and by kind: tests (file::function, or file::function[case]).
PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "right answer, to a stated tolerance, on every shape of world": {
        **_all(PRESETS_WITHOUT_AUTO, *(f"{_CONTRACT}test_representatives_of_every_kind[{each}]" for each in _LAYOUTS)),
        "local_sgd": ("test_local_sgd.py::test_the_mean_is_over_ranks_whatever_they_hold[2+1-parameters]",),
        "auto": ("test_auto.py::test_switching_between_all_ways_loses_nothing[2+1]",),
    },
    "replicas bit-identical": {
        **_all(PRESETS_WITHOUT_AUTO, *(f"{_CONTRACT}test_representatives_of_every_kind[{each}]" for each in _LAYOUTS)),
        "local_sgd": (f"{_LOCAL_SGD}test_nodes_learn_by_themselves_and_meet[2+1]",),
        "auto": ("test_auto.py::test_switching_between_all_ways_loses_nothing[2+1]",),
    },
    "replicas that differ are named, and no others": {
        kind: (
            "test_divergence.py::test_ordinary_training_raises_no_alarm",
            "test_checksum.py::test_every_flipped_bit_changes_the_checksum",
            "test_checksum.py::test_an_order_has_its_checksum",
        )
        for kind in KINDS
    },
    "nothing is lost": {
        "cast": (f"{_CONSERVATION}[bf16-2-bfloat16]",),
        "quantized": (
            f"{_CONSERVATION}[inter 4 bits-2x2 interleaved-bfloat16]",
            "test_feedback_formula.py::test_residuals_stay_bounded",
        ),
        "onebit": (f"{_CONSERVATION}[inter onebit rms-3x2-float32]", f"{_CONSERVATION}[onebit mean-3-bfloat16]"),
        "dgc": (f"{_CONSERVATION}[inter top 5%-2+1 interleaved-float32]",),
        "powersgd": (f"{_CONSERVATION}[inter rank 2-3x2-bfloat16]",),
        "local_sgd": (f"{_DELTAS}test_it_is_diloco",),
        "auto": ("test_handover.py::test_nothing_is_lost_whatever_comes_next[2x2-names0]",),
    },
    "what is zero on all ranks stays zero": {
        **_all(PRESETS_WITHOUT_AUTO, f"{_ZEROS}test_what_nobody_touches_stays_zero[1+1]"),
        "quantized": (
            f"{_ZEROS}test_what_nobody_touches_stays_zero[1+1]",
            f"{_ZEROS}test_it_stays_zero_through_servers_leaders_scalers_and_rounding[3-dtype1-False-quantized:bits=4]",
        ),
        "local_sgd": (f"{_ZEROS}test_rounds_of_local_sgd_move_nothing_that_nobody_touches[onebit_local-(1, 1, 1)]",),
    },
    "non-finite values reach every rank, and change no residual": {
        **_all(("flat", "hierarchical"), f"{_CONTRACT}test_non_finite_values_reach_every_rank_of_every_kind"),
        "cast": (f"{_NOT_FINITE}[bf16-3]",),
        "quantized": (f"{_NOT_FINITE}[inter 4 bits-2x2]",),
        "onebit": (f"{_NOT_FINITE}[inter onebit mean-2x2]",),
        "dgc": (f"{_NOT_FINITE}[inter top 5%-2x2]",),
        "powersgd": (f"{_NOT_FINITE}[inter rank 2-2x2]",),
        "local_sgd": (f"{_LOCAL_SGD}test_a_node_drops_a_step_alone_and_the_others_wait_for_nothing",),
        "auto": ("test_handover.py::test_a_dropped_step_keeps_what_was_to_be_handed_over[2x2]",),
    },
    "a state is of one moment, and asking for it changes no bit": {
        kind: (
            "test_checkpoints_under_way.py::test_snapshots_of_ddp",
            "test_checkpoints_under_way.py::test_in_a_step_it_is_refused_on_every_rank",
        )
        for kind in KINDS
    },
    "a job that is killed at any byte of a save has the last whole file": {
        kind: ("test_checkpoint_files.py::test_a_save_that_is_cut_at_any_byte_leaves_the_last_whole_file",)
        for kind in KINDS
    },
    "state follows the parameter": {
        "quantized": (
            f"{_RESUMING}[inter stochastic-2x2-True-scaler]",
            "test_feedback_state.py::test_another_world_takes_over_every_residual[inter 4 bits-2x2-3x2]",
        ),
        "onebit": (f"{_RESUMING}[inter onebit rms-2+1-False-]",),
        "dgc": (f"{_RESUMING}[inter top 5%-2x2-False-]",),
        "powersgd": (f"{_RESUMING}[inter rank 2-2x2-True-]",),
        "local_sgd": (f"{_LOCAL_SGD}test_a_resumed_run_averages_at_the_same_steps",),
        "auto": ("test_auto.py::test_a_checkpoint_knows_the_tuning",),
    },
    "nobody hangs": {
        kind: (
            f"{_EVERY}test_a_killed_rank_is_an_error_on_all_others[{kind}]",
            "test_failures.py::test_backward",
            "test_bad_input.py::test_another_configuration_on_one_rank",
            "test_meetings.py::test_a_meeting_that_one_rank_left_fails_on_all",
            "test_heartbeat.py::test_a_stopped_rank_is_named_on_every_other_one_and_by_the_doctor",
        )
        for kind in KINDS
    },
    "nothing damaged is loaded": {
        "local_sgd": (f"{_DELTAS}test_between_rounds_it_averages_saves_and_moves_to_another_world",),
        "cast": (f"{_DAMAGED}test_damaged_states_are_refused_or_train_finitely[float16]",),
        "quantized": (f"{_DAMAGED}test_what_is_wrong_is_named_on_every_rank[8 bits]",),
        "onebit": (f"{_DAMAGED}test_damaged_states_are_refused_or_train_finitely[bfloat16]",),
        "dgc": (f"{_DAMAGED}test_what_is_wrong_is_named_on_every_rank[top 5%]",),
        "powersgd": (f"{_DAMAGED}test_what_is_wrong_is_named_on_every_rank[rank 2]",),
        "auto": (f"{_DAMAGED}test_what_is_wrong_is_named_on_every_rank[8 bits]",),
    },
    "the returned tensor is legal": {
        **{kind: (f"{_FEATURE}[several_buckets-{_preset(kind)}]",) for kind in ("flat", "quantized", "powersgd")},
        **{kind: (f"{_CLUSTERS}[{_preset(kind)}-2-(1, 1)]",) for kind in ("hierarchical", "cast", "onebit", "dgc")},
        "local_sgd": (f"{_LOCAL_SGD}test_nodes_learn_by_themselves_and_meet[2+1]",),
        "auto": (f"{_CLUSTERS}[auto-2-(1, 1)]",),
    },
    "accounting": {
        **_all(PRESETS_WITHOUT_AUTO, "test_cost_calls.py::test_calls_are_what_is_called[2x2]"),
        **_all(("quantized", "dgc", "powersgd"), f"{_COUNTED}[2x2-names2-bfloat16]"),
        "local_sgd": (f"{_LOCAL_SGD}test_nodes_learn_by_themselves_and_meet[2+1]",),
    },
    "memory beside DDP's by the formula of the preset's docstring": {
        **{kind: (f"{_MEMORY}[{_preset(kind)}-2x2]",) for kind in PRESETS_WITHOUT_AUTO},
        "local_sgd": (f"{_MEMORY}[diloco:period=2-2x2]",),
    },
    "the same plan everywhere": {
        "hierarchical": (
            f"{_PLANS}[hierarchical-default]",
            "test_hook_plans.py::test_every_rank_follows_what_rank_0_decides",
        ),
        "quantized": (f"{_PLANS}[hierarchical_quantized-default]",),
        "powersgd": (f"{_PLANS}[hierarchical_powersgd-default]",),
        "auto": ("test_auto.py::test_ranks_with_different_tunings_are_told",),
    },
    "FSDP2's modes leave torch's bits": {
        "flat": (
            f"{_MODES}[ten steps]",
            f"{_MODES}[accumulated over the shards]",
            f"{_MODES}[bfloat16, reduced in float32]",
            f"{_MODES}[divided by the shards]",
        ),
    },
    "all ranks compute with equal weights, none of them stale": {
        "quantized": (
            "test_sharded_1d.py::test_all_ranks_compute_with_equal_weights_in_forward_and_backward",
            "test_sharded_1d.py::test_no_forward_computes_with_weights_of_before[True]",
        ),
    },
    "exact weights have FSDP's own bits, in no more bytes": {
        "flat": (
            "test_sharded_exact.py::test_every_bit_is_as_without[bf16]",
            "test_sharded_exact.py::test_no_forward_computes_with_other_bits_and_no_jump_costs_more_than_raw",
        ),
    },
    "a reader has the bits of a version that was written, or none": {
        "flat": (
            "test_patches.py::test_a_writer_may_be_killed_at_every_byte[folder-97]",
            "test_patches.py::test_a_damaged_file_is_named_and_passed_over[000000000003.patch]",
        ),
    },
    "without compression, `adam=` is torch's AdamW": {
        "onebit": (
            "test_adam.py::test_without_compression_it_is_adamw[1+1-True-200-1]",
            "test_adam.py::test_no_update_is_lost[signs-1+1-2]",
        ),
        "dgc": ("test_adam.py::test_no_update_is_lost[largest-2x2-2]",),
    },
    "`auto` leaves a strategy by which the model falls behind exact averages": {
        "quantized": ("test_guard.py::test_the_guard_finds_what_the_model_was_not_told",),
        "auto": ("test_guard.py::test_an_injected_bad_strength_is_left_within_fifty_steps",),
    },
    "nothing that a worker or a stranger sends loses the server's model": {
        "flat": (f"{_HOSTILE}test_who_lies_is_dropped_by_name", f"{_HOSTILE}test_nonsense_at_random"),
        "quantized": (f"{_HOSTILE}test_random_bytes_are_no_delta_that_loses_the_model",),
    },
    "the store is asked as much of each rank in every world, and a bounded number a second": dict.fromkeys(
        KINDS,
        (
            "test_scale.py::test_each_rank_asks_as_much_in_an_agreement_however_many_there_are",
            "test_scale.py::test_ranks_that_wait_look_so_often_in_all_and_see_the_answer_soon",
            "test_scale.py::test_beats_ask_a_bounded_number_of_requests_a_second",
        ),
    ),
    "any number of connections gives the bits of one, and all are used": _all(
        tuple(KINDS),
        f"{_CONNECTIONS}test_any_number_of_connections_gives_the_bits_of_one[float32-(2, 2)]",
        f"{_CONNECTIONS}test_any_number_of_connections_gives_the_bits_of_one[float32-(1, 1, 1)]",
        f"{_CONNECTIONS}test_every_connection_carries_its_share[3-COMMOPT_CONNECTIONS]",
    ),
    "never slower in silence": {
        "auto": (
            "test_search.py::test_keeps_stock_ddp_where_nothing_pays_and_says_so",
            "test_auto.py::test_tunes_by_itself_within_sixty_steps[quantized+powersgd]",
        ),
    },
}

# Where a promise says nothing about a kind, or no more than about another.
WITHOUT: dict[str, dict[str, str]] = {
    "nothing is lost": dict.fromkeys(("flat", "hierarchical"), "leaves nothing out"),
    "what is zero on all ranks stays zero": {"auto": "sends what one of the others sends"},
    "state follows the parameter": {
        **dict.fromkeys(("flat", "hierarchical"), "keeps nothing"),
        "cast": "keeps residuals as the quantized do",
    },
    "nothing damaged is loaded": dict.fromkeys(("flat", "hierarchical"), "keeps nothing"),
    "accounting": {"auto": "sends what one of the others sends"},
    "memory beside DDP's by the formula of the preset's docstring": {"auto": "needs what one of the others needs"},
    "the same plan everywhere": {
        **dict.fromkeys(("flat", "cast", "onebit", "dgc"), "plans do not see which compressor it is"),
        "local_sgd": "has no plan",
    },
    "FSDP2's modes leave torch's bits": {
        **dict.fromkeys(("hierarchical", *LOSSY), "adds up in another order, or leaves something out"),
        "local_sgd": "lets nodes differ",
        "auto": "refused for models of FSDP2",
    },
    "all ranks compute with equal weights, none of them stale": {
        **dict.fromkeys(("flat", "hierarchical", "cast", "onebit"), "weights travel as they do with the quantized"),
        **dict.fromkeys(("dgc", "powersgd", "local_sgd", "auto"), "refused for models sharded over all ranks"),
    },
    "exact weights have FSDP's own bits, in no more bytes": dict.fromkeys(
        ("hierarchical", *LOSSY, "local_sgd", "auto"), "weights travel as they do with flat, or not at all"
    ),
    "a reader has the bits of a version that was written, or none": dict.fromkeys(
        ("hierarchical", *LOSSY, "local_sgd", "auto"), "files do not see how gradients were averaged"
    ),
    "without compression, `adam=` is torch's AdamW": {
        **dict.fromkeys(("flat", "hierarchical", "local_sgd", "auto"), "takes no adam="),
        **dict.fromkeys(("cast", "quantized"), "compressed as with one bit"),
        "powersgd": "refuses adam=: directions are not of low rank",
    },
    "`auto` leaves a strategy by which the model falls behind exact averages": {
        **dict.fromkeys(("flat", "hierarchical"), "leaves nothing out"),
        **dict.fromkeys(("cast", "onebit", "dgc", "powersgd"), "sampled as the quantized"),
        "local_sgd": "refused: nodes are to differ",
    },
    "nothing that a worker or a stranger sends loses the server's model": dict.fromkeys(
        ("hierarchical", "cast", "onebit", "dgc", "powersgd", "local_sgd", "auto"),
        "deltas are checked once they are decoded, whatever encoded them",
    ),
    "never slower in silence": dict.fromkeys((*PRESETS_WITHOUT_AUTO, "local_sgd"), "was asked for by name"),
}


# By what README.md says, tests that run in the gate and not in `make test`: programs, networks and frameworks.
GATE: dict[str, tuple[str, ...]] = {
    "it installs from a clone, without a compiler": (
        "test_packaging.py::test_wheel_holds_both_packages_and_the_kernel_sources",
    ),
    "a DDP script trains with it as it is": ("test_run_cli.py::test_a_script_trains_with_the_hook",),
    "fewer bytes between nodes": (f"{_CONTRACT}test_network_counters_agree_with_wire_bytes[(2, 2)]",),
    "the model still learns": (
        "test_feedback_convergence.py::test_feedback_reaches_the_loss_of_dense_training[3-names0]",
    ),
    "a slow network is emulated": ("test_cluster.py::test_command_line_runs_a_module_and_reports",),
    "a lossy network is emulated, too": (
        "test_cluster_links.py::test_a_round_trip_takes_the_delays_of_both_nodes",
        "test_cluster_links.py::test_the_command_cuts_a_link_and_reports_retransmissions",
        "test_verdict_cluster.py::test_one_stream_on_a_long_path_is_named_with_the_number_that_carries_more",
    ),
    "it trains in Lightning, Accelerate and Transformers": (
        "test_integrations_lightning.py::test_lightning_and_fabric",
        "test_integrations_transformers.py::test_accelerate_and_the_trainer",
    ),
    "machines may be slow, die and come back": (
        "test_parameter_server.py::test_command_lines",
        "test_parameter_server.py::test_with_all_workers_it_is_local_sgd[3-Outer(lr=0.7, momentum=0.9, nesterov=True)]",
    ),
    "nobody hangs": (
        "test_failures.py::test_every_rank_raises_when_the_network_between_nodes_is_cut[hook]",
        "test_verdict_direct.py::test_what_breaks_ends_and_the_rest_is_measured_without[hangs]",
    ),
    "from a clone to a script on two nodes": ("test_site.py::test_from_a_clone_to_a_script_on_two_nodes",),
    "kernels for GPUs": ("test_races.py::test_every_kernel",),
}


def gate() -> set[str]:
    """Return all tests of `GATE`."""
    return {test for tests in GATE.values() for test in tests}


def promised(promises: Mapping[str, Mapping[str, tuple[str, ...]]] = PROMISES) -> set[str]:
    """Return all tests of the table."""
    return {test for kinds in promises.values() for tests in kinds.values() for test in tests}
