"""`ActivePass`: the pass that the routers of one model use now, and the module hooks that keep it current.

The hooks see a forward start and end, and tie its backward to its pass.
"""

from __future__ import annotations

import copy
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from moe_replay.errors import ReplayStateError
from moe_replay.replay.passes import ForwardPass, LayerRoutes
from moe_replay.replay.site import Chunk, PlanSlot, RouterSite
from moe_replay.routes.plan import DispatchPlan

MAX_BACKWARDS = 16  # at a time; those of an aborted backward are dropped as newer ones come


class RouterHook(ABC):
    """A hook on one router, through which the active pass records or sets its choice of experts.

    Its methods are bound: a deep copy of an attached model gets separate hooks and a separate `ActivePass`.

    slot            that it puts the plan of the pass in, for the experts behind the router; None: they use none
    gates_problem   why gate weights cannot be replayed; None: they can
    """

    def __init__(self, site: RouterSite, active: ActivePass, gates_problem: str | None = None) -> None:
        self.site = site
        self.active = active
        self.slot: PlanSlot | None = None
        self.gates_problem = f"{site}: {gates_problem}" if gates_problem else None
        self.install()

    @staticmethod
    @abstractmethod
    def is_installed(module: Any) -> bool:
        """Return whether a router has a hook of this kind."""

    @abstractmethod
    def install(self) -> None:
        """Put the hook on its router; nothing where it is there already."""

    @abstractmethod
    def remove(self) -> None:
        """Restore the router as it was; nothing where the hook is not there."""

    def put_plan(self, plan: DispatchPlan | None) -> None:
        if self.slot is not None:
            self.slot.put(plan)


class ActivePass:
    """The pass that a model's routers use: that of the forward or backward that calls them; None: native routing.

    A forward uses the pass that is open. A backward uses the pass of the forward whose outputs or layers autograd has
    reached: hooks on their tensors call `enter_backward`. Backwards are told apart by autograd's graph task, so
    that forwards and backwards of several threads do not disturb each other.

    opened           the pass of the open context
    run_eagerly      runs a hook outside compiled code, where it must see autograd
    eager_routers    whether routers run outside compiled code
    detached_hooks   router hooks of a controller that was detached, for backwards that are still to come
    slots            plans that experts are given, dropped when a context closes and when a backward ends
    recompute_only   whether a training forward outside any context gets a pass for its recomputation
    """

    def __init__(self, *, recompute_only: bool = False) -> None:
        self.recompute_only = recompute_only
        self.opened: ForwardPass | None = None
        self.run_eagerly: Callable[..., Any] = torch.compiler.disable(_outside_the_graph)
        self.eager_routers = False
        self.detached_hooks: tuple[RouterHook, ...] = ()
        self.slots: tuple[PlanSlot, ...] = ()
        self._recomputes = False
        self._has_opened = recompute_only  # refuse the backward of a checkpoint that no pass could be opened in
        self._opener: EntryHooks | None = None  # of a pass that no context has opened
        self._thread = _Thread()
        self._backwards: dict[int, _Backward] = {}  # by graph task
        self.outputs = TensorPasses()

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivePass:
        """Return a new one without any pass: a copy of a model has nothing to do with the contexts of the original."""
        copied = ActivePass(recompute_only=self.recompute_only)
        copied.slots = copy.deepcopy(self.slots, memo)
        return copied

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
        self.opened = None
        self._thread.slot.use(None)
        self._thread.slot.has_opened = False
        self._drop_plans()

    def open_training(self, opener: EntryHooks, module: nn.Module) -> None:
        """Open a pass for a training forward that begins outside any context, for its recomputation."""
        if self._opener is opener:  # its forward before was interrupted
            self.close_training(opener)
        if self.recompute_only and self.opened is None and module.training and torch.is_grad_enabled():
            layer_routes = {layer: LayerRoutes(layer) for layer in opener.layers}
            self.open(ForwardPass("training forward", layer_routes, [opener.layers]), recomputes=True)
            self._opener = opener

    def close_training(self, opener: EntryHooks) -> None:
        """Close the pass that the same hooks have opened."""
        if self._opener is opener:
            self._opener = None
            self.close()

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
            if backward.is_guess and self._has_opened:
                raise ReplayStateError(
                    "a router is recomputed in a backward whose forward is not known",
                    expected="decoder layers that are recomputed on the tensors that their forward was given",
                    found="a tensor that left its context and was changed before another module of the model took it",
                    remedy="Run the whole model, norm and head included, inside one context",
                )
            return backward.current
        if not self._has_opened:
            return None
        raise self.untraced()

    def untraced(self) -> ReplayStateError:
        """Return the error of a recomputation whose forward had no pass."""
        return ReplayStateError(
            "a router is recomputed in a backward that cannot be traced to a forward of the model",
            expected="a backward that goes through outputs or layers of the attached model",
            found="a checkpoint whose outputs this controller has never seen",
            remedy="Call the attached model itself, and checkpoint its layers rather than the whole model with "
            "use_reentrant=True",
        )

    def enter_backward(self, forward_pass: ForwardPass | None, *, is_guess: bool = False) -> None:
        """Make the pass of a forward that autograd has reached the one of this backward (None: a native forward).

        is_guess   nothing shows that this pass computed the tensor
        """
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
        backward.enter(forward_pass, is_guess)
        backward.set(self._thread.slot)

    def follow_backward(self, passes: Sequence[ForwardPass | Gone | None] = ()) -> None:
        """Use the pass of the forward that is recomputed now.

        passes   passes in which the module was given these inputs. The same inputs may have gone through several: then
               the one that autograd has reached counts
        """
        backward = self._backwards.get(torch._C._current_graph_task_id())
        if passes and (backward is None or backward.is_guess or backward.forward_pass not in passes):
            forward_pass = passes[-1]
            is_guess = len(passes) > 1 or isinstance(forward_pass, Gone)
            self.enter_backward(None if isinstance(forward_pass, Gone) else forward_pass, is_guess=is_guess)
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
            self._drop_plans()
            for hook in self.detached_hooks:
                hook.remove()

    def _drop_plans(self) -> None:
        for slot in self.slots:
            slot.put(None)


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
        self.forward_pass: ForwardPass | None = None
        self.is_guess = False
        self.thread = threading.get_ident()
        self._recomputed: dict[int, ForwardPass] = {}
        self._previous: dict[_Slot, ForwardPass | None] = {}

    def enter(self, forward_pass: ForwardPass | None, is_guess: bool) -> None:
        self.forward_pass = forward_pass
        self.is_guess = is_guess
        if forward_pass is not None and id(forward_pass) not in self._recomputed:
            self._recomputed[id(forward_pass)] = forward_pass.for_recompute()
        self.current = None if forward_pass is None else self._recomputed[id(forward_pass)]

    def set(self, slot: _Slot) -> None:
        self._previous.setdefault(slot, slot.current)
        slot.use(self.current)

    def restore(self) -> None:
        for slot, previous in self._previous.items():
            slot.use(previous)


def _outside_the_graph(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# ---- hooks on modules ------------------------------------------------------------------------------------------------


def register_hooks(chunk: Chunk, active: ActivePass) -> list[RemovableHandle]:
    handles = []
    for depth, module in enumerate(chunk.entry_modules):
        hooks = EntryHooks(chunk.layers, depth, active)
        handles.append(module.register_forward_pre_hook(hooks.begin_forward, with_kwargs=True))
        # A pass that no context closes must be closed after an error too.
        always = active.recompute_only
        handles.append(module.register_forward_hook(hooks.end_forward, with_kwargs=True, always_call=always))
    for module in chunk.boundary_modules:
        boundary = BoundaryHook(active)
        handles.append(module.register_forward_pre_hook(boundary.begin_module, with_kwargs=True))
        handles.append(module.register_forward_hook(boundary.end_module, with_kwargs=True))
    return handles


class EntryHooks:
    """Hooks on one of the modules around the decoder layers of a chunk.

    Their methods are bound, so that a deep copy of the model has its own hooks.
    """

    def __init__(self, layers: tuple[int, ...], depth: int, active: ActivePass) -> None:
        self.layers = layers
        self.depth = depth
        self.active = active
        self.inputs = TensorPasses()

    def begin_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Start a forward of the open pass and compare what it is fed."""
        if not torch.compiler.is_compiling():
            self._begin_eager(module, args, kwargs)
        elif self.active.needs_eager_hooks():
            self.active.run_eagerly(self._begin_eager, module, args, kwargs)
        else:
            self._begin_compiled(args, kwargs)

    def _begin_eager(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self.active.begin_forward():
            self.active.follow_backward(self.inputs.of(_tensors((args, kwargs))))
            if self.active.recompute_only and module.training and self.active.for_router() is None:
                raise self.active.untraced()
            return
        self.active.open_training(self, module)
        forward_pass = self.active.opened
        self.inputs.add(_tensors((args, kwargs)), forward_pass)
        if forward_pass is not None:
            forward_pass.begin_chunk(self.layers, self.depth)
            self._feed(forward_pass, args, kwargs)

    def _begin_compiled(self, args: tuple, kwargs: dict[str, Any]) -> None:
        forward_pass = self.active.begin_compiled()
        ids = _fed_token_ids(args, kwargs)
        if forward_pass is not None and ids is not None:
            forward_pass.feed_compiled(ids, _attention_mask(args, kwargs))

    def _feed(self, forward_pass: ForwardPass, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = _fed_token_ids(args, kwargs)
        if ids is not None:
            forward_pass.feed(self.layers, self.depth, ids, _attention_mask(args, kwargs))

    def end_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Compare what the module was really fed, and tie the backward of its outputs to the pass."""
        if not torch.compiler.is_compiling():
            self._end_eager(args, kwargs, output)
        elif self.active.needs_eager_hooks():
            self.active.run_eagerly(self._end_eager, args, kwargs, output)

    def _end_eager(self, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        in_forward = torch._C._current_graph_task_id() == -1
        if in_forward and self.active.opened is not None:
            self._feed(self.active.opened, args, kwargs)  # hooks registered after ours may have changed it
        if in_forward:
            self.active.outputs.add(_tensors(output), self.active.opened)
        if torch.is_grad_enabled():
            _tie(_tensors(output), self.active, self.active.for_router())
        if in_forward:
            self.active.close_training(self)


class BoundaryHook:
    """Hook on a decoder layer, or on a module next to the layers: its inputs are the outputs of what ran before it.

    They are tied to the pass even inside a reentrant checkpoint, whose outputs no hook on a module can see otherwise.
    """

    def __init__(self, active: ActivePass) -> None:
        self.active = active
        self.inputs = TensorPasses()

    def begin_module(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Tie the backward of the inputs to the pass that computed them."""
        if torch.compiler.is_compiling():
            return
        tensors = list(_tensors((args, kwargs)))
        if not self.active.begin_forward():
            self.active.follow_backward(self.inputs.of(tensors))
            return
        self.inputs.add(tensors, self.active.opened)
        for tensor in tensors:
            # The module may run in another context than what computed its input, e.g. a head after the layers' context.
            producers = self.active.outputs.of([tensor])
            forward_pass = producers[-1] if producers else GONE
            if isinstance(forward_pass, Gone):
                _tie([tensor], self.active, self.active.opened, is_guess=True)
            else:
                _tie([tensor], self.active, forward_pass)

    def end_module(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
            self.active.outputs.add(_tensors(output), self.active.opened)


class Gone:
    """Stands for a pass whose graph has been freed."""


GONE = Gone()


class TensorPasses:
    """The passes that tensors took part in, by the memory of the tensor.

    Autograd keeps the memory of what a recomputed module was given, so this names the pass of its forward, whatever
    context its outputs went through later. A weak reference keeps the address of freed memory from being reused.
    """

    def __init__(self) -> None:
        self._passes: dict[int, tuple[StorageWeakRef, list[weakref.ref[ForwardPass] | None]]] = {}
        self._limit = 256

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorPasses:
        return TensorPasses()

    def add(self, tensors: Iterable[torch.Tensor], forward_pass: ForwardPass | None) -> None:
        """Note that tensors take part in a pass; None: a native forward."""
        reference = None if forward_pass is None else weakref.ref(forward_pass)
        for tensor in tensors:
            if tensor.is_floating_point():
                storage = tensor.untyped_storage()
                _, references = self._passes.setdefault(storage._cdata, (StorageWeakRef(storage), []))
                if reference not in references:
                    references.append(reference)
        if len(self._passes) > self._limit:
            self._passes = {key: entry for key, entry in self._passes.items() if not entry[0].expired()}
            self._limit = max(256, 2 * len(self._passes))

    def of(self, tensors: Iterable[torch.Tensor]) -> list[ForwardPass | Gone | None]:
        """Return the passes in which all of those tensors that are known took part, the oldest first."""
        common: list[weakref.ref[ForwardPass] | None] | None = None
        for tensor in tensors:
            entry = self._passes.get(tensor.untyped_storage()._cdata) if tensor.is_floating_point() else None
            if entry is not None:
                common = [pass_ref for pass_ref in entry[1] if common is None or pass_ref in common]
        return [None if pass_ref is None else pass_ref() or GONE for pass_ref in common or ()]


def _tie(
    tensors: Iterable[torch.Tensor], active: ActivePass, forward_pass: ForwardPass | None, *, is_guess: bool = False
) -> None:
    """Enter the backward of a pass when autograd goes back through what computed these tensors."""

    def on_backward(grad: torch.Tensor) -> None:
        active.enter_backward(forward_pass, is_guess=is_guess)

    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.register_hook(on_backward)


def _fed_token_ids(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    ids = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(ids, torch.Tensor) and ids.is_nested:  # verl hands those to later pipeline stages, which ignore them
        return None
    return ids if isinstance(ids, torch.Tensor) and not ids.is_floating_point() else None


def _attention_mask(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    mask = kwargs.get("attention_mask", args[1] if len(args) == 2 else None)
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
