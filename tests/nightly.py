"""What `make test` leaves to `make nightly`: further variants of what it runs anyway.

A pattern is matched against the whole name of a test, behind `tests/`. A test that stands alone
carries the marker `nightly` itself.
"""

import re

VARIANTS = [
    r"asynchronous/test_asynchronous_model.py::test_a_(program_ends_though|server_that_is_killed)_.*",
    r"asynchronous/test_asynchronous_model.py::test_a_task_is_trained_by_two_workers_and_.*",
    r"asynchronous/test_asynchronous_model.py::test_a_worker_that_is_killed_costs_.*",
    r"benchmarks/test_sync_bench.py::test_the_program_trains_by_each_policy",
    r"callbacks/test_checkpoint.py::test_all_of_the_state_is_kept\[(loss_scale|executions|opaque)\]",
    r"callbacks/test_checkpoint.py::test_an_interrupted_run_ends_as_if_.*\[in_scope-at2\]",
    r"callbacks/test_stall.py::test_a_worker_that_hangs_ends\[pause.*\]",
    r"cluster/test_spawn.py::test_each_worker_has_its_devices",
    r"cluster/test_standby.py::test_what_is_not_ready_in_time_.*",
    r"colab/.*::test_it_runs\[(?!data_parallel).*\]",
    r"commands/test_bench.py::test_(between_workers_at_the_sizes_of_a_model|other_collectives_.*1-Tens.*)",
    r"commands/test_bench_train.py::test_a_slow_worker_is_found_and_drawn",
    r"commands/test_check.py::test_(a_layer_that_mixes_examples_.*\[replica_id.*|one_device_divides_nothing)",
    r"commands/test_check.py::test_(a_network_whose_rounding|layers_on_devices_are|variables_without).*",
    r"commands/test_check.py::test_half_precision_may_be_wrong_by_what_it_is_wrong_by_on_one_device",
    r"commands/test_check.py::test_what_xla_compiles_is_exact",
    r"commands/test_plan.py::test_auto_on_one_device_measures_nothing",
    r"commands/test_train.py::test_(a_killed_run|the_number_of_devices|nan_is_named|errors_of_the_task).*",
    r"commands/test_train.py::test_a_gpu_that_cannot_be_split\[flags1-.*",
    r"commands/test_train.py::test_callbacks_and_tensorboard_on_two_workers",
    r"diagnostics/test_check_faults.py::test_a_planted_fault_is_found\[models/digits_cnn.*-(loss|rows).*",
    r"diagnostics/test_gpu.py::test_a_network_trains_in_parts_.*\[(CNN|LSTM|ragged|transformer).*\]",
    r"diagnostics/test_gpu.py::test_each_form_is_compiled_.*\[compiled\]",
    r"diagnostics/test_inject.py::test_a_fault_strikes_in_the_first_attempt_alone\[exit.*\]",
    r"docs/test_migrate.py::test_after_is_one_training_on_.*\[(ddp|tf.distribute)\]",
    r"hybrid/test_hybrid_parallel.py::test_a_mask_decides_the_divisor_.*\[2 x 1 x 2\]",
    r"hybrid/test_hybrid_parallel.py::test_each_replica_runs_.*\[(accum|clipping|scaled).*\]",
    r"hybrid/test_hybrid_parallel.py::test_trains_to_the_weights_of_one_device\[2 x 2 x 1-gpipe\]",
    r"hybrid/test_updates.py::test_batches_in_stages_.*-gpipe\]",
    r"layers/test_tensor_parallel.py::test_what_an_optimizer_does_.*\[Nadam-.*\]",
    r"layers/test_tensor_parallel.py::test_what_weight_decay_leaves_out_is_left_out\[False\]",
    r"layers/test_variable.py::test_a_checkpoint_holds_.*\[(split|to three devices)\]",
    r"layers/test_variable.py::test_a_loop_of_the_users_own\[(?!AdamW.*True-False|SGD.*False-True).*\]",
    r"models/test_applications.py::test_a_form_trains_.*\[(?!language_model).*\]",
    r"models/test_models.py::test_a_task_learns\[resnet.*\]",
    r"pipeline/test_commands.py::test_bench_measures_stages_in_processes",
    r"pipeline/test_memory.py::.*",
    r"pipeline/test_pipeline_parallel.py::test_a_metric_inside_of_a_layer_.*\[memory\]",
    r"pipeline/test_pipeline_parallel.py::test_it_trains_to_the_weights_.*\[residual-options2\]",
    r"pipeline/test_pipeline_parallel.py::test_ragged_tensors_.*\[options[12]\]",
    r"pipeline/test_traced_once.py::test_a_pipeline_trains_.*\[(?!read_twice).*-gpipe-9\]",
    r"placement/test_processes.py::test_(a_process_that_is_killed|devices_cannot_be_chosen).*",
    r"placement/test_processes.py::test_a_job_that_is_killed_resumes_to_the_weights_of_one_process",
    r"replication/test_accumulated_steps.py::test_it_is_one_step_on_a_larger_batch\[.*-1\]",
    r"replication/test_custom_loop.py::test_an_optimizer_may_be_prepared_.*\[clipnorm\]",
    r"replication/test_custom_loop.py::test_the_weights_and_slots_.*\[(averages|clipvalue|sgd)\]",
    r"replication/test_sharded_optimizer.py::test_it_trains_as_one_device_does\[(A.*[^mW]|F.*|L.*|"
    r"N.*|R.*|S.*D|a schedule|clipvalue|momentum|moving average at the end)\]",
    r"step/test_ahead.py::test_a_step_is_traced_once\[train_on_batch-.*\]",
    r"step/test_metrics.py::test_(no_other_output_meets|what_meets_is_told)\[1f1b\]",
    r"step/test_metrics.py::test_it_is_that_of_one_device\[eager-(1f1b|gpipe)\]",
    r"step/test_where_rows_meet.py::test_a_mask_with_an_axis_more_than_the_losses\[sum-.*\]",
    r"step/test_where_rows_meet.py::test_each_outputs_loss_has_the_weight_of_its_rows\[eager-.*\]",
    r"step/test_where_rows_meet.py::test_one_row_for_all_is_refused_.*\[weights-.*\]",
    r"step/test_where_rows_meet.py::test_what_does_not_fit_is_refused_in_fit\[.*GPU:.*-gpipe\]",
    r"step/test_xla.py::test_a_compiled_dropout_draws_.*\[(model|tensor)\]",
    r"test_startup.py::test_the_users_log_level_is_kept",
    r"workers/test_commands.py::test_(a_missing_worker|workers_with_another_seed).*",
    r"workers/test_commands.py::test_a_proxy_of_the_environment_captures_nothing",
    r"workers/test_commands.py::test_what_a_worker_may_not_be_asked\[--strategy.*",
    r"workers/test_compression.py::.*\[mpi.*",
    r"workers/test_flight.py::test_(without_a_folder|a_step_and_what_is_in_it_.*\[mpi\]).*",
    r"workers/test_hybrid.py::.*\[1\]",
    r"workers/test_hybrid.py::test_workers_that_cut_the_batch_in_different_ways_are_refused",
    r"workers/test_init.py::test_a(_job_with_servers|rguments_that_contradict_are_refused\[tfparallel.init\(\)).*",
    r"workers/test_init.py::test_a_program_that_makes_its_data_first\[wrapped\]",
    r"workers/test_local_steps.py::test_a_task_is_trained_and_reported\[--compression=powersgd:2\]",
    r"workers/test_mpi.py::test_(the_survivor_names|workers_of_several_hosts|.*tensorflow-expected1).*",
    r"workers/test_restart.py::test_all_workers_refuse_what_the_chief_cannot_use",
    r"workers/test_restart.py::test_a_(damaged_checkpoint|killed_worker)_costs_.*",
    r"workers/test_restart.py::test_a_(killed_chief|worker_that_hangs|job_that_is_told).*",
    r"workers/test_traffic.py::test_predictions_cross_only_where_they_must\[mpi\]",
    r"workers/test_traffic.py::test_predictions_larger_than_all_weights_stay_where_they_are",
    r"workers/test_tutorials.py::test_a_custom_training_loop.*",
]

_ANY = re.compile("|".join(f"(?:{pattern})" for pattern in VARIANTS))


def is_nightly(name: str) -> bool:
    """Whether a test, by its whole name, is one of these."""
    return _ANY.fullmatch(name.removeprefix("tests/")) is not None
