"""Start a worker module on several processes of this machine, and read back what each rank found."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    """What one launch gave: scenario name to one result or one traceback per rank, and the processes' own output."""

    results: list[dict]
    errors: list[dict[str, str]]
    output: str
    seed: int

    def of(self, name: str) -> list:
        """The results of one scenario, by rank; fails with the ranks' tracebacks."""
        found = [f"rank {rank}:\n{errors[name]}" for rank, errors in enumerate(self.errors) if name in errors]
        if found or not self.results or not all(name in r for r in self.results):
            earlier = [e for errors in self.errors for e in errors if e != name]
            raise AssertionError("\n".join(found) or f"{name} did not run (after {earlier}):\n{self.output[-6000:]}")
        return [r[name] for r in self.results]


def _end(process: subprocess.Popen, folder: Path) -> None:
    """End the launcher, then whatever of its workers is left; each wrote the id of its own process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for path in folder.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


def run_command(command: list[str], folder: Path, timeout: float, **environment: str) -> tuple[int, str]:
    """Run a command in a process group of its own, one thread a process, and end it at ``timeout`` seconds."""
    log = folder / "output.txt"
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **environment,
    }
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = -1
            stream.write(f"\nended after {timeout} s\n")
        finally:
            if process.poll() is None or process.returncode:
                _end(process, folder)
    return code, log.read_text()


def torchrun(processes: int, *arguments: str) -> list[str]:
    """The command line of ``torchrun`` on a free port of this machine."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", str(processes)]
    return [*run, "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", *arguments]


def launch(
    module: str, folder: Path, seed: int, processes: int = 2, timeout: float = 300, **environment: str
) -> Outcome:
    """Run every scenario of ``tests.distributed.<module>`` on ``processes`` ranks."""
    command = torchrun(processes, "-m", f"tests.distributed.{module}")
    environment |= {"HOT_TEST_FOLDER": str(folder), "HOT_TEST_SEED": str(seed)}
    code, output = run_command(command, folder, timeout, **environment)
    saved = [torch.load(path, weights_only=False) for path in sorted(folder.glob("rank*.pt"))]
    if len(saved) != processes or (code and not any(s["errors"] for s in saved)):
        raise AssertionError(f"{module}: exit status {code}, {len(saved)} of {processes} ranks reported\n{output}")
    return Outcome([s["results"] for s in saved], [s["errors"] for s in saved], output, seed)
