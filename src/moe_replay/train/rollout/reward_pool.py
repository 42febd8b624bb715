"""Scores of sampled groups: `RewardPool` runs the functions in separate processes, `InProcess` in threads of this one.

A function that hangs in C code, takes too long or ends its process costs one sample: the process is killed and
replaced, and the sample is named in an error or left unscored.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from moe_replay.engines.event_loop import gather_or_cancel
from moe_replay.train.config.sections import RewardConfig
from moe_replay.train.rollout import reward_worker as worker
from moe_replay.train.rollout.prompts import Prompt
from moe_replay.train.rollout.reward_worker import LENGTH, RewardWireError, TokenIds, from_content, to_frame
from moe_replay.train.rollout.rewards import Reward, RewardError, score
from moe_replay.utils.misc import text_of

logger = logging.getLogger(__name__)

CHECKED_ROWS = 1000
OnTimeout = Literal["error", "unscored"]
Scores = dict[str, np.ndarray]
"""(n,) float64 by name of the reward, NaN where it did not score a sample."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one prompt as reward functions get them: one value of each for every sample.

    row       of the data set
    numbers   of the samples in their group
    """

    row: int
    numbers: Sequence[int]
    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: Mapping[str, Sequence[Any]]

    @classmethod
    def of(cls, prompt: Prompt, completions: Sequence[np.ndarray], tokenizer: Any) -> Samples:
        """Return completions as text, or as messages if the prompt is messages."""
        texts: list[Any] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
        if not isinstance(prompt.content, str):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        count = len(completions)
        columns: dict[str, list[Any]] = {name: [value] * count for name, value in prompt.columns.items()}
        columns["completion_ids"] = [TokenIds(ids) for ids in completions]
        return cls(prompt.row, range(count), [prompt.content] * count, texts, columns)

    def __len__(self) -> int:
        return len(self.numbers)

    def part(self, indices: Sequence[int]) -> Samples:
        columns = {name: [values[index] for index in indices] for name, values in self.columns.items()}
        return Samples(
            self.row,
            [self.numbers[index] for index in indices],
            [self.prompts[index] for index in indices],
            [self.completions[index] for index in indices],
            columns,
        )


class Scorer(Protocol):
    """Runs reward functions.

    timeouts   samples so far that were left unscored because a function took too long or ended its process
    """

    timeouts: int

    async def start(self) -> None:
        """Prepare for the first samples."""

    async def score(self, samples: Samples) -> Scores: ...

    def close(self) -> None: ...


def open_scorer(config: RewardConfig, rewards: Sequence[Reward]) -> Scorer:
    return RewardPool(rewards, config.workers, config.on_timeout) if config.workers else InProcess(rewards)


class InProcess:
    """Runs reward functions in threads of this process; one that takes too long is an error."""

    timeouts = 0

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._rewards = rewards

    async def start(self) -> None:
        """Do nothing: functions are loaded already."""

    async def score(self, samples: Samples) -> Scores:
        columns = {
            name: [value.tolist() if isinstance(value, TokenIds) else value for value in values]
            for name, values in samples.columns.items()
        }
        return await asyncio.to_thread(score, self._rewards, samples.prompts, samples.completions, columns)

    def close(self) -> None:
        """Do nothing: threads of functions that have not returned are left behind."""


class RewardPool:
    """Runs reward functions in up to `workers` processes, which are started when they are needed.

    Functions that score each sample alone have `timeout_s` for each. Others get a whole group in one call, which may
    take that for each of its samples; if it takes longer, its samples are tried one by one to find the cause.

    on_timeout   what becomes of a sample whose function takes too long or ends its process; None: "unscored" for
                 built-in rewards, "error" for others
    """

    def __init__(self, rewards: Sequence[Reward], workers: int, on_timeout: OnTimeout | None = None) -> None:
        self.timeouts = 0
        self._rewards = rewards
        self._on_timeout = on_timeout
        self._free = asyncio.Semaphore(workers)
        self._idle: list[RewardProcess] = []
        self._started: list[RewardProcess] = []

    async def start(self) -> None:
        """Start the first process, so that it is there when the first samples are."""
        async with self._free, self._process():
            pass

    async def score(self, samples: Samples) -> Scores:
        """Return the scores of the samples of a group; its rewards run side by side."""
        scores = await gather_or_cancel(self._score(reward, samples) for reward in self._rewards)
        return {reward.name: values for reward, values in zip(self._rewards, scores, strict=True)}

    def close(self) -> None:
        for process in self._started:
            process.kill()
        for process in self._started:
            process.process.wait()
        self._started, self._idle = [], []

    @property
    def pids(self) -> list[int]:
        return [process.process.pid for process in self._started if process.alive]

    # ---- one reward ---------------------------------------------------------------------------------------------

    async def _score(self, reward: Reward, samples: Samples) -> np.ndarray:
        each = reward.scores_each_alone
        values = np.full(len(samples), np.nan)
        left = np.arange(len(samples))
        while left.size:
            scores, lost = await self._call(reward, samples.part(left.tolist()), each=each)
            values[left[: len(scores)]] = [np.nan if value is None else value for value in scores]
            if lost is None:
                break
            left = left[len(scores) :]
            causes = left[:1] if each or left.size == 1 else await self._causes(reward, samples, left)
            self._give_up(reward, samples.part((causes if causes.size else left).tolist()), lost)
            left = np.setdiff1d(left, causes) if causes.size else causes
        return values

    async def _causes(self, reward: Reward, samples: Samples, indices: np.ndarray) -> np.ndarray:
        """Return the places of samples that are lost on their own too."""
        calls = await asyncio.gather(
            *(self._call(reward, samples.part([index]), each=False) for index in indices.tolist()),
            return_exceptions=True,  # a function may need several samples; then none of them is the cause
        )
        for call in calls:
            if isinstance(call, BaseException) and not isinstance(call, RewardError):
                raise call
        lost = [not isinstance(call, BaseException) and call[1] is not None for call in calls]
        return indices[np.array(lost, bool)]

    def _give_up(self, reward: Reward, samples: Samples, lost: RewardLostError) -> None:
        location = f"{', '.join(map(str, samples.numbers))} of row {samples.row}"
        if (self._on_timeout or ("unscored" if reward.is_built_in else "error")) == "error":
            raise RewardError(
                f"reward {reward.name!r} {lost.problem}",
                sample=location,
                found=f"the completion {text_of(samples.completions[0])[:80]!r}",
                remedy="Give up earlier in the function, raise reward.timeout_s, "
                "or leave such samples unscored: reward.on_timeout = 'unscored'",
            ) from lost
        self.timeouts += len(samples)
        logger.warning("unscored: sample %s: reward %r %s", location, reward.name, lost.problem)

    async def _call(
        self, reward: Reward, samples: Samples, *, each: bool
    ) -> tuple[list[float | None], RewardLostError | None]:
        """Return the values of the samples; if the process was lost, those before that, and how it was lost."""
        request = {"reward": reward.name, "each": each, "prompts": samples.prompts}
        frame = to_frame(request | {"completions": samples.completions, "columns": samples.columns})
        answers, limit_s = (len(samples), reward.timeout_s) if each else (1, reward.timeout_s * len(samples))
        values: list[float | None] = []
        async with self._free, self._process() as process:
            try:
                await process.ask(frame, answers, limit_s, values)
            except RewardLostError as lost:
                process.kill()
                return values, lost
            except RewardError as error:  # of the function: the process is as good as before
                raise _placed(error, samples, len(values)) from error
        return values, None

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[RewardProcess]:
        """Yield a process that has imported the functions; it is killed if the block is cancelled."""
        while self._idle and not self._idle[-1].alive:
            self._idle.pop()
        process = self._idle.pop() if self._idle else self._new()
        usable = False
        try:
            await process.load()
            try:
                yield process
                usable = True
            except RewardError:
                usable = True
                raise
        finally:
            if usable and not process.killed:
                self._idle.append(process)
            else:
                process.kill()

    def _new(self) -> RewardProcess:
        self._started = [process for process in self._started if process.alive]
        process = RewardProcess([reward.name for reward in self._rewards])
        self._started.append(process)
        return process


def _placed(error: RewardError, samples: Samples, scored: int) -> RewardError:
    """Return an error of a function with the row of the data set, and the sample where it names one."""
    number = "" if error.sample is None else f"{samples.numbers[scored + int(error.sample)]} of "
    return RewardError(error.problem, **error.facts | {"sample": f"{number}row {samples.row}"})


def check_columns(prompts: Sequence[Prompt]) -> None:
    """Raise if a column of the data cannot be sent to a process; looks at the first `CHECKED_ROWS` prompts."""
    for prompt in prompts[:CHECKED_ROWS]:
        for name, value in prompt.columns.items():
            try:
                to_frame({name: value})
            except RewardWireError as error:
                facts = error.facts | {"sample": f"row {prompt.row}"}
                raise RewardWireError(f"column {name!r}: {error.problem}", **facts) from error


START_S = 600.0
"""Seconds in which a process must have imported the functions."""


class RewardLostError(RewardError):
    """A reward process that has ended, or was killed because it did not answer in time."""


class RewardProcess:
    """A process with these rewards, in its own process group. It belongs to the running event loop.

    It ends when the thread that started it does.

    killed   whether this process has killed it
    """

    def __init__(self, rewards: Sequence[str]) -> None:
        self.process, self._socket = worker.start_process(worker.__name__, rewards=list(rewards))
        self._socket.setblocking(False)
        self._loaded = False
        self.killed = False

    async def load(self) -> None:
        """Wait until it has imported the functions."""
        if self._loaded:
            return
        try:
            await self._receive(START_S)
        except RewardLostError as lost:
            raise RewardError(
                f"a reward process {lost.problem} while it imported the functions",
                remedy="Its output says why. With reward.workers = 0 functions run in the trainer's process",
            ) from lost
        self._loaded = True

    async def ask(self, frame: bytes, answers: int, limit_s: float, values: list[float | None]) -> None:
        """Send a request and add the values of its answers to `values`; each answer may take `limit_s`.

        Raises RewardLostError if one takes longer or the process ends, and the error of a function.
        """
        for _ in range(answers):
            values += (await self._receive(limit_s, frame))["values"]
            frame = b""

    async def _receive(self, limit_s: float, frame: bytes = b"") -> dict[str, Any]:
        """Send a frame if there is one, and return the next message."""
        try:
            async with asyncio.timeout(None if limit_s == math.inf else limit_s):
                await asyncio.get_running_loop().sock_sendall(self._socket, frame)
                (length,) = LENGTH.unpack(await self._read(LENGTH.size))
                message = from_content(await self._read(length))
        except TimeoutError as error:
            raise RewardLostError(f"did not return within {limit_s:g} s") from error
        except (EOFError, OSError) as error:
            raise RewardLostError(await self._ending()) from error
        if "error" in message:
            raise _as_error(message["error"])
        return message

    async def _read(self, count: int) -> bytes:
        """Return `count` bytes; EOFError if the process closes its end before."""
        content, loop = bytearray(count), asyncio.get_running_loop()
        view = memoryview(content)
        while view:
            received = await loop.sock_recv_into(self._socket, view)
            if not received:
                raise EOFError
            view = view[received:]
        return bytes(content)

    async def _ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            status = await asyncio.to_thread(self.process.wait, 5.0)
            if status == os.EX_IOERR:
                return "closed the connection of its process, a file descriptor that it had not opened"
            return f"ended its process by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        return "closed the connection of its process"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process and what it has started in its process group, without waiting for it."""
        if self.killed:
            return
        self.killed = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._socket.close()


def _as_error(content: Mapping[str, Any]) -> RewardError:
    error = RewardError(**content["parts"])
    if content["traceback"]:
        error.add_note(f"In the reward process:\n{content['traceback']}")
    return error
