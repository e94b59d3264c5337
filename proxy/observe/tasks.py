"""Follows the prompts of a phase-aware engine through its transitions, where its counters cannot be read. Pure.

A sample tells how many tokens of a slot's prompt were computed and how many came from the cache. Once it told so, the whole
prompt's number is known when it is `ready`, also if it ends before the next sample. A prompt that no sample saw may have been
computed whole or come from the cache but for one token, a cancelled one may have got anywhere: that is told as unsure.

Children of one prompt (`n` > 1) show a copy of their parent's counter. They are admitted at the same instant, and their
prompt counts once. Of a task whose admission was not seen it is not known whether it has such relatives: only what it shows
before its prompt is whole is surely its own.
"""

from dataclasses import dataclass
from typing import Final

from proxy.backends.slots import SlotsReport
from proxy.types import MemberState, PhaseEvent, SlotView

_DONE: Final = frozenset({MemberState.READY, MemberState.GENERATE, MemberState.PAUSED})


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt, how much of it has been counted, and what of it was cached, once known; shared by parent and children.

    `owner` is the one that was seen computing it: if it is cancelled, one of the others begins anew. Once it is `whole` all
    of them are, except for those whose parent was cancelled, who may be `orphans`: each of these computes it for itself.
    """

    total: int
    computed: int = 0
    cached: int | None = None
    settled: bool = False
    whole: bool = False
    orphans: bool = False
    admitted: bool = True
    owner: "_Task | None" = None


@dataclass(slots=True, eq=False)
class _Task:
    """`seen` is how far it was when it was last looked at."""

    prompt: _Prompt
    id: int | None = None
    ready: bool = False
    seen: int = 0


class TaskBook:
    """The prompts on one engine's slots."""

    def __init__(self, report: SlotsReport) -> None:
        """Begin with a view; what is processed there was so before."""
        self._tasks: dict[int, _Task] = {}
        self._group: tuple[int, str, int] | None = None
        self._group_prompt = _Prompt(0)
        for slot in report.slots:
            if slot.busy:
                self._tasks[slot.id] = self._found(slot, counted=slot.processed_tokens or 0)

    def advance(self, report: SlotsReport) -> tuple[int, int]:
        """Take the next view; return the prompt tokens computed since, and how many more are possible."""
        computed = unsure = 0
        ended: list[_Task] = []
        if report.lost:
            # who became whole, left or began again meanwhile is not known: nobody's relatives are any more
            self._tasks = {
                slot.id: self._found(slot, counted=task.prompt.computed)
                for slot in report.slots
                if slot.busy and (task := self._tasks.get(slot.id)) is not None and task.id == slot.task
            }
        else:
            for event in report.events:
                unsure += self._event(event, ended)
        for slot in report.slots:
            if slot.busy:
                more, maybe = self._see(slot)
                computed, unsure = computed + more, unsure + maybe
        # last, because a slot may tell what an ended task of the same prompt had
        for task in ended:
            more, maybe = _end(task)
            computed, unsure = computed + more, unsure + maybe
        return computed, unsure

    def _event(self, event: PhaseEvent, ended: list[_Task]) -> int:
        """Take a transition; return the tokens that a cut prompt may have had, and leave whole ones in `ended`."""
        if event.slot is None:
            return 0
        task = self._tasks.get(event.slot)
        match event.event:
            case "admit" if task is None:
                self._tasks[event.slot] = _Task(self._prompt_of(event))
            case "admit" if task is not None and not event.cohort:
                # it begins again, there was no room for it; its family's are no longer told apart
                self._tasks[event.slot] = _Task(_Prompt(event.tokens, admitted=False))
                return _cut(task)
            case "ready" if task is not None:
                # of orphans each computes the prompt, and no view may have shown this one at it
                own = task.prompt.whole and task.prompt.orphans and not task.ready
                task.ready = task.prompt.whole = True
                return _most(task.prompt) if own else 0
            case "release" if task is not None:
                del self._tasks[event.slot]
                if not task.ready:
                    return _cut(task)
                ended.append(task)
            case _:
                pass  # an admit to its cohort after the wait, and what tells nothing of prompts
        return 0

    def _prompt_of(self, event: PhaseEvent) -> _Prompt:
        group = (event.t_us, event.request, event.tokens)
        if group != self._group:
            self._group, self._group_prompt = group, _Prompt(event.tokens)
        return self._group_prompt

    def _see(self, slot: SlotView) -> tuple[int, int]:
        """Take what a slot shows; return the tokens that are new, and those that passed for another one's before."""
        task = self._tasks.get(slot.id)
        if task is None:
            task = self._tasks[slot.id] = self._found(slot, counted=0)
        task.id = slot.task
        if task.prompt.whole and not task.ready and in_progress(slot):
            # what was counted is the one's that is whole
            if task.prompt.owner is task:
                task.prompt.owner = None
            task.prompt = _Prompt(task.prompt.total)
        processed, cached = slot.processed_tokens or 0, slot.cached_tokens
        if processed or cached:
            # before its prompt begins a slot says 0 and 0
            task.prompt.cached = cached or 0
        if not task.prompt.admitted and not in_progress(slot):
            return 0, 0
        # what it had before is never new, whatever became of those it shared its prompt with
        before, task.seen = task.seen, processed
        hidden = max(0, before - task.prompt.computed)
        grown = max(0, processed - max(before, task.prompt.computed))
        task.prompt.computed = max(processed, task.prompt.computed)
        if grown and in_progress(slot):
            task.prompt.owner = task
        return grown, hidden

    @staticmethod
    def _found(slot: SlotView, counted: int) -> _Task:
        return _Task(_Prompt(slot.prompt_tokens or 0, counted, admitted=False), id=slot.task)


def in_progress(slot: SlotView) -> bool:
    """Whether the slot's prompt is not whole yet. Where there are no member states, the first token tells."""
    return slot.busy and slot.member not in _DONE and not slot.decoded_tokens


def _rest(prompt: _Prompt) -> int:
    return max(0, prompt.total - (prompt.cached or 0) - prompt.computed)


def _most(prompt: _Prompt) -> int:
    return max(0, prompt.total - (prompt.cached or 0))


def _cut(task: _Task) -> int:
    """Return how many more tokens a prompt that did not become whole may have had."""
    prompt = task.prompt
    if prompt.whole:
        # it computed for itself what another one was whole with
        return _most(prompt)
    prompt.orphans = True
    if prompt.settled or prompt.owner not in (None, task):
        return 0
    rest = _rest(prompt)
    if prompt.owner is task:
        prompt.computed, prompt.cached, prompt.owner = 0, None, None
    return rest


def _end(task: _Task) -> tuple[int, int]:
    """Return what a whole prompt had besides what was counted, surely and possibly."""
    prompt = task.prompt
    if prompt.settled:
        return 0, 0
    prompt.settled = True
    rest = _rest(prompt)
    if not prompt.admitted:
        return 0, rest
    if prompt.cached is not None:
        prompt.computed += rest
        return rest, 0
    # the last token of a prompt is always computed
    least = min(1, rest) if prompt.computed == 0 else 0
    prompt.computed += least
    return least, rest - least
