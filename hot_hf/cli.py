"""The ``hot-hf`` command: a row per subcommand, whose module has ``add_arguments(parser)`` and ``run(args) -> int``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

COMMANDS = {
    "demo": ("hot_hf.demo.command", "fine-tune twice from one seed, exact and with HOT, and compare"),
    "doctor": ("hot_hf.doctor", "show devices and backends, and check every operator on them"),
    "estimate": ("hot_hf.memory.command", "predict training memory from a configuration, and the largest batch"),
    "plan": ("hot_hf.selection.command", "show a plan that was selected by budget, as a table and a plot"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; user errors end with a message and status 2, not a traceback."""
    parser = argparse.ArgumentParser(prog="hot-hf", description="Hadamard-based optimized training for Hugging Face.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = sys.argv[1:] if argv is None else argv
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in argv[:1]:  # import only what runs: `hot-hf --help` needs no transformers
            import_module(module).add_arguments(command)
    args = parser.parse_args(argv)
    try:
        return import_module(COMMANDS[args.command][0]).run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"hot-hf {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
