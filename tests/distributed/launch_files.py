"""Accelerate's own reading of scripts/launch: configuration file to the environment its processes start with."""

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "scripts" / "launch"
NAMES = ("one_machine", "ddp", "fsdp2", "deepspeed_zero3")


def launch_arguments(name: str, *extra: str):
    """(arguments, defaults) as ``accelerate launch --config_file scripts/launch/NAME.yaml`` has them."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    config = str(FOLDER / f"{name}.yaml")
    arguments = launch_command_parser().parse_args(["--config_file", config, *extra, "train.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    return arguments, defaults


def environment(name: str) -> dict[str, str]:
    """What ``accelerate launch`` adds to the environment of the training processes."""
    from accelerate.utils import launch

    arguments, defaults = launch_arguments(name)
    arguments.main_process_port = 0
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, env = launch.prepare_deepspeed_cmd_env(arguments)
    elif name == "one_machine":
        _, env = launch.prepare_simple_launcher_cmd_env(arguments)
    else:
        env = launch.prepare_multi_gpu_env(arguments)
    return {k: v for k, v in env.items() if k.startswith(("ACCELERATE_", "FSDP_"))}
