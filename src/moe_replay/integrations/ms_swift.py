"""A guard for routing replay in ms-swift: `moe-replay plugin ms-swift > plugin.py`, `--external_plugins plugin.py`.

ms-swift imports this module in every process of a run, rollout servers too. Trainers are changed as soon as ms-swift
itself imports them; a version that was not tested is refused here. docs/coming-from.md has settings and metrics.
"""

from moe_replay.integrations.hosts import MS_SWIFT, after_import

MS_SWIFT.check_version()
after_import("swift.megatron.trainers.grpo_trainer", "moe_replay.integrations.ms_swift_megatron:install")
after_import("swift.ray.megatron.megatron_worker", "moe_replay.integrations.ms_swift_megatron:install_on_ray")
