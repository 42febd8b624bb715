"""Nothing outlives the process it serves: engines, ranks, folders, shared memory. vLLM: test_vllm_processes.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from moe_replay.utils.processes import clear_leftovers, list_shared_files, owned_folder, start_time
from tests.faults.forked import fork_command
from tests.faults.processes import LIMIT_S, ROOT, process, start_python, wait_for_line, wait_until_gone
from tests.ports import answers

# ---- processes ------------------------------------------------------------------------------------------------------

CHILD = """
import os, sys, time
from moe_replay.utils.processes import end_with_parent
end_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(100000)
"""
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}])
"""


def test_a_child_ends_with_its_parent() -> None:
    with start_python(PARENT) as parent:
        assert parent.stdout is not None
        child = process(int(parent.stdout.readline()))
        assert child.alive
        parent.kill()
    assert wait_until_gone([child]) == []


RANK = """
import os, time
from moe_replay.train.setup.launch import end_with_launcher

end_with_launcher()
print(f"rank {os.getpid()}", flush=True)
time.sleep(100000)
"""


@pytest.mark.distributed
@pytest.mark.whole_runs
def test_ranks_end_with_the_agent_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True) as agent:
        assert agent.stdout is not None
        ranks = [process(int(wait_for_line(agent.stdout, "rank ").split()[1])) for _ in range(2)]
        assert all(rank.alive for rank in ranks)
        agent.kill()
        agent.wait(LIMIT_S)
        assert wait_until_gone(ranks) == []


@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_and_closes_its_engine(number: signal.Signals, port: int) -> None:
    pytest.importorskip("tyro")
    pytest.importorskip("uvicorn")
    words = ["rollout", "--model", "none", "--engine", "tests.faults.engines:start", "--port", str(port)]
    words += ["--limits.header-s", "0.5"]
    with fork_command(*words, environment={"MOE_REPLAY_TOKEN": "secret"}) as server:
        engine = process(int(wait_for_line(server.stdout, "engine ").split()[1]))
        while not answers(port):
            assert server.poll() is None
            time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: ")  # and no more
            assert slow.recv(1) == b""
        server.send_signal(number)
        rest = server.stdout.read()  # until everything that can write to it is gone
        assert server.wait(LIMIT_S) == 0, rest
        assert "aborted" in rest
    assert wait_until_gone([engine]) == []


@pytest.mark.engine
def test_a_server_whose_engine_died_ends(port: int) -> None:
    pytest.importorskip("tyro")
    pytest.importorskip("uvicorn")
    words = ["rollout", "--model", "none", "--engine", "tests.faults.engines:start", "--port", str(port)]
    with fork_command(*words, environment={"MOE_REPLAY_TOKEN": "secret"}) as server:
        os.kill(int(wait_for_line(server.stdout, "engine ").split()[1]), signal.SIGKILL)
        assert "an engine 1 has died" in server.stdout.read()
        assert server.wait(LIMIT_S) != 0


# ---- folders and shared memory --------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from moe_replay.utils.processes import list_shared_files, owned_folder

with owned_folder(Path(sys.argv[1])) as folder:
    memory = SharedMemory(create=True, size=4096)
    (folder / "weights").write_bytes(b"large")
    list_shared_files(folder)
    print(memory.name, flush=True)
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory with names")
def test_what_a_killed_process_left_is_cleared_at_the_next_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=LIMIT_S
    )
    left = Path("/dev/shm", done.stdout.strip())
    assert left.is_file()
    assert len(list(tmp_path.iterdir())) == 1
    with owned_folder(tmp_path) as mine:
        assert not left.exists()
        assert list(tmp_path.iterdir()) == [mine]
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    """Folders of processes that live, of other machines, and shared memory that somebody still uses."""
    with owned_folder(tmp_path) as mine:
        elsewhere = tmp_path / f"moe-replay-othermachine-{os.getpid()}-1-x"
        other = tmp_path / "moe-replay-notes"
        reused = tmp_path / mine.name.replace(f"-{start_time(os.getpid())}-", "-1-")  # a process id given again
        for folder in (elsewhere, other, reused):
            folder.mkdir()
        memory = SharedMemory(create=True, size=4096)
        try:
            list_shared_files(reused)
            assert (reused / "shared-memory").read_text() == memory.name.lstrip("/")
            assert clear_leftovers(tmp_path) == [reused]
            assert Path("/dev/shm", memory.name.lstrip("/")).exists()
        finally:
            memory.close()
            memory.unlink()
        assert {path.name for path in tmp_path.iterdir()} == {mine.name, elsewhere.name, other.name}


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name")
def test_weights_on_their_way_are_in_no_folder() -> None:
    from moe_replay.weights.checkpoint import as_files

    contents = []
    for file in as_files([b"first", b"second"]):
        contents.append(subprocess.run(["cat", str(file)], capture_output=True, timeout=LIMIT_S).stdout)
        assert str(file).startswith(f"/proc/{os.getpid()}/fd/")
    assert contents == [b"first", b"second"]
