"""`ActivePass`: which pass the routers of one model use now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from moe_replay.errors import ReplayStateError
from moe_replay.replay.passes import ForwardPass
from moe_replay.replay.site import RouterHook

MAX_BACKWARDS = 16  # at a time; those of an aborted backward are dropped as newer ones come


class ActivePass:
    """The pass that a model's routers use: that of the forward or backward that calls them; None: native routing.

    A forward uses the pass that is open. A backward uses the pass of the forward whose outputs or layers autograd has
    reached: hooks on their tensors call `enter_backward`. Backwards are told apart by autograd's graph task, so
    that forwards and backwards of several threads do not disturb each other.

    opened           the pass of the open context
    run_eagerly      runs a hook outside compiled code, where it must see autograd
    detached_hooks   router hooks of a controller that was detached, for backwards that are still to come
    """

    def __init__(self) -> None:
        self.opened: ForwardPass | None = None
        self.run_eagerly: Callable[..., None] = torch.compiler.disable(_hook_outside_the_graph)
        self.detached_hooks: tuple[RouterHook, ...] = ()
        self._recomputes = False
        self._has_opened = False
        self._thread = _Thread()
        self._backwards: dict[int, _Backward] = {}  # by graph task

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivePass:
        """Return a new one without any pass: a copy of a model has nothing to do with the contexts of the original."""
        return ActivePass()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ReplayStateError(
            "an attached model cannot be pickled",
            remedy="Save its state_dict(), or call detach() on its controller first",
        )

    def open(self, forward_pass: ForwardPass, *, recomputes: bool) -> None:
        """Make a pass the open one; passes do not nest. `recomputes`: layers are recomputed in the backward."""
        if self.opened is not None:
            raise ReplayStateError(
                f"a {forward_pass.purpose} was opened inside a {self.opened.purpose} of the same model",
                remedy="Contexts do not nest: close the first; to see native choices while replaying, "
                "use replay(batch, observe=True)",
            )
        self.opened = forward_pass
        self._thread.slot.use(forward_pass)
        self._thread.slot.has_opened = True
        self._recomputes = recomputes
        self._has_opened = True

    def close(self) -> None:
        """Close the open pass."""
        self.opened = None
        self._thread.slot.use(None)
        self._thread.slot.has_opened = False

    def needs_eager_hooks(self) -> bool:
        """Return whether the hooks of a forward that is being compiled must run eagerly, at the cost of graph breaks.

        They must where layers are recomputed, where the context is another thread's, and where a forward outside any
        context may be the recomputation of one that was inside.
        """
        if self.opened is None:
            return self._has_opened and torch.is_grad_enabled()
        return self._recomputes or not self._thread.slot.has_opened

    def begin_compiled(self) -> ForwardPass | None:
        """Return the open pass, and let compiled code use it."""
        self._thread.slot.use(self.opened)
        return self.opened

    def begin_forward(self) -> bool:
        """Return whether this is a forward, and not a recomputation inside a backward."""
        if torch._C._current_graph_task_id() != -1:
            return False
        self._thread.slot.use(self.opened)
        thread = threading.get_ident()
        aborted = [task for task, backward in self._backwards.items() if backward.thread == thread]
        for task in aborted:  # this thread is not in a backward any more
            del self._backwards[task]
        return True

    def for_router(self) -> ForwardPass | None:
        """Return the pass that a router uses which is called now; None: it routes natively."""
        if torch.compiler.is_compiling():
            return self._thread.slot.current
        task = torch._C._current_graph_task_id()
        if task == -1:
            return self.opened
        backward = self._backwards.get(task)
        if backward is not None:
            return backward.current
        if not self._has_opened:
            return None
        raise ReplayStateError(
            "a router is recomputed in a backward that cannot be traced to a forward of the model",
            expected="a backward that goes through outputs or layers of the attached model",
            found="a checkpoint whose outputs this controller has never seen",
            remedy="Call the attached model itself, and checkpoint its layers rather than the whole model with "
            "use_reentrant=True",
        )

    def enter_backward(self, forward_pass: ForwardPass | None) -> None:
        """Make the pass of a forward that autograd has reached the one of this backward (None: a native forward)."""
        task = torch._C._current_graph_task_id()
        backward = self._backwards.get(task)
        if backward is None:
            while len(self._backwards) >= MAX_BACKWARDS:
                del self._backwards[min(self._backwards)]
            backward = self._backwards[task] = _Backward()
            for hook in self.detached_hooks:
                hook.install()
            # Runs when this backward has ended, also inside the nested backwards of reentrant checkpointing.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))
        backward.enter(forward_pass)
        backward.set(self._thread.slot)

    def follow_backward(self) -> None:
        """Let compiled code use the pass of the backward that recomputes a layer now."""
        self.for_router()  # raises in a backward that is not known
        backward = self._backwards.get(torch._C._current_graph_task_id())
        if backward is not None:
            backward.set(self._thread.slot)

    def detach(self, hooks: Sequence[RouterHook]) -> None:
        """Remove the router hooks; a backward that is still to come installs them until it ends."""
        self.detached_hooks = tuple(hooks)
        for hook in hooks:
            hook.remove()

    def _end_backward(self, task: int) -> None:
        backward = self._backwards.pop(task, None)
        if backward is not None:
            backward.restore()
        if not self._backwards:
            for hook in self.detached_hooks:
                hook.remove()


class _Slot:
    """State that compiled code uses in one thread: it cannot ask autograd whether it runs in a backward.

    current     the pass of the forward or backward that runs in this thread
    has_opened  whether the open context was opened in this thread
    """

    def __init__(self) -> None:
        self.current: ForwardPass | None = None
        self.has_opened = False

    def use(self, forward_pass: ForwardPass | None) -> None:
        self.current = forward_pass


class _Thread(threading.local):
    """The slot of each thread."""

    def __init__(self) -> None:
        self.slot = _Slot()


class _Backward:
    """One running backward: the passes that it has reached, and the one it is in."""

    def __init__(self) -> None:
        self.current: ForwardPass | None = None
        self.thread = threading.get_ident()
        self._recomputed: dict[int, ForwardPass] = {}
        self._previous: dict[_Slot, ForwardPass | None] = {}

    def enter(self, forward_pass: ForwardPass | None) -> None:
        if forward_pass is not None and id(forward_pass) not in self._recomputed:
            self._recomputed[id(forward_pass)] = forward_pass.for_recompute()
        self.current = None if forward_pass is None else self._recomputed[id(forward_pass)]

    def set(self, slot: _Slot) -> None:
        self._previous.setdefault(slot, slot.current)
        slot.use(self.current)

    def restore(self) -> None:
        for slot, previous in self._previous.items():
            slot.use(previous)


def _hook_outside_the_graph(hook: Callable[..., None], *args: Any) -> None:
    hook(*args)
