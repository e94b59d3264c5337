"""How a running observation looks on a terminal, and as plain lines."""

from collections import deque
from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from proxy.clock import monotonic
from proxy.observe.account import Account, ServerAccount, rates
from proxy.observe.frames import Frame
from proxy.observe.records import ServerState
from proxy.types import EnginePhase, MemberState, SlotView

_WIDE = 120
_PHASE_STYLE = {
    EnginePhase.PREFILL_OPEN: "yellow",
    EnginePhase.PREFILL_SEALED: "yellow",
    EnginePhase.YIELD_PREFILL: "magenta",
    EnginePhase.GENERATE: "green",
}
_MEMBER_STYLE = {
    MemberState.QUEUED: "red",
    MemberState.PREFILL: "yellow",
    MemberState.READY: "cyan",
    MemberState.GENERATE: "green",
    MemberState.PAUSED: "magenta",
}


def view(account: Account, width: int, height: int) -> RenderableType:
    """Return everything that fits into `width` columns and `height` lines."""
    count = len(account.servers)
    room = max(1, (height - 4 - len(account.header.logs)) // count - (3 if width >= _WIDE else 4))
    parts: list[RenderableType] = []
    for server in account.servers:
        parts.append(_headline(server, width))
        parts.append(_slots(server, width, room))
    parts.append(_together(account))
    notes = dict.fromkeys(note for server in account.servers for note in server.notes)
    parts += [Text(clean(note), "yellow") for note in notes]
    for log, path in enumerate(account.header.logs):
        name = clean(path.rsplit("/", 1)[-1])
        parts.append(
            Text(f"{name}: {clean(account.log_last[log])}", "dim", no_wrap=True, overflow="ellipsis")
        )
    return Group(*parts)


def plain_lines(account: Account) -> Iterator[str]:
    """Yield a line per server, and one for all together where there are several."""
    for server in account.servers:
        state = _state(server).plain
        yield f"{server.name}  {state}  {_rate_words(_server_rates(server))}"
    if len(account.servers) > 1:
        yield f"together  {_rate_words(rates(account.recent))}"


def _server_rates(server: ServerAccount) -> tuple[float, float] | None:
    """A server by itself: a frame of one."""
    return rates(deque(Frame((point,)) for point in (*list(server.recent)[:1], *list(server.recent)[-1:])))


def _headline(server: ServerAccount, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(clean(server.name), "bold")
    text.append("  ")
    text.append_text(_state(server))
    text.append("  " if width >= _WIDE else "\n  ")
    text.append(_rate_words(_server_rates(server)), "bold")
    if width >= _WIDE and server.up is not None:
        up = server.up
        about = " · ".join(clean(word) for word in (up.policy, up.model, up.build) if word)
        text.append(f"  {about}", "dim")
    if server.lost:
        text.append(f"  {sum(n for *_, n in server.lost)} transitions lost", "red")
    return text


def _state(server: ServerAccount) -> Text:
    mark, latest = server.mark, server.latest
    if mark is None:
        return Text("asking", "dim")
    if mark.state is not ServerState.UP or latest is None:
        since = f" for {max(0.0, monotonic() - mark.at_s):.0f} s" if latest is not None else ""
        return Text(f"{mark.state.value}{since}: {clean(mark.why)}", "red")
    report = latest.report
    text = Text()
    if report.native:
        text.append(report.phase.value, _PHASE_STYLE.get(report.phase, "dim"))
        if report.cohort is not None and report.phase is not EnginePhase.IDLE:
            text.append(f" · cohort {report.cohort}")
    else:
        text.append("no phases", "dim")
    text.append(f" · {report.busy}/{len(report.slots)} slots")
    return text


def _slots(server: ServerAccount, width: int, room: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), width=width)
    wide = width >= _WIDE
    table.add_column("slot", justify="right", width=4)
    table.add_column("state", width=8)
    table.add_column("request", ratio=2, no_wrap=True, overflow="ellipsis")
    table.add_column("prompt", width=40 if wide else 12)
    table.add_column("tokens", justify="right", width=15 if wide else 11)
    table.add_column("answer", justify="right", width=8 if wide else 6)
    table.add_column("waited", justify="right", width=14 if wide else 7)
    slots = server.latest.report.slots if server.latest is not None else ()
    shown = sorted(slots, key=lambda slot: (not slot.busy, slot.id))[:room]
    for slot in sorted(shown, key=lambda slot: slot.id):
        table.add_row(*_row(slot))
    if len(slots) > len(shown):
        table.add_row("…", f"{len(slots) - len(shown)} more", style="dim")
    return table


def _row(slot: SlotView) -> tuple[RenderableType, ...]:
    if not slot.busy:
        return str(slot.id), Text("idle", "dim"), "", "", "", "", ""
    known = slot.member is not MemberState.NONE
    member = Text(slot.member.value, _MEMBER_STYLE[slot.member]) if known else Text("busy")
    request = clean(slot.tag) or (f"task {slot.task}" if slot.task is not None else "")
    done = (slot.processed_tokens or 0) + (slot.cached_tokens or 0)
    total = slot.prompt_tokens
    if total:
        bar: RenderableType = ProgressBar(total=total, completed=min(done, total))
        tokens = f"{min(done, total)}/{total}"
    else:
        bar, tokens = "", str(done or "")
    answer = str(slot.decoded_tokens) if slot.decoded_tokens else ""
    return str(slot.id), member, request, bar, tokens, answer, _waited(slot)


def _waited(slot: SlotView) -> Text:
    waits = {
        MemberState.QUEUED: slot.queue_ms,
        MemberState.READY: slot.wait_ms,
        MemberState.PAUSED: slot.paused_ms,
    }
    now = waits.get(slot.member)
    total = slot.queue_ms + slot.wait_ms + slot.paused_ms
    if now is None:
        return Text(_seconds(total) if total else "", "dim")
    return Text(_seconds(now), "red" if slot.member is MemberState.QUEUED else "")


def _together(account: Account) -> Text:
    progress = account.progress
    text = Text(no_wrap=True, overflow="ellipsis")
    if len(account.servers) > 1:
        text.append("together  ", "bold")
        text.append(_rate_words(rates(account.recent)), "bold")
        if account.recent:
            text.append(f"  skew ≤ {max(f.skew_s for f in account.recent) * 1000:.0f} ms", "dim")
        if unpaired := sum(account.unpaired):
            text.append(f"  {unpaired} samples unpaired", "dim")
        text.append("\n")
    text.append(
        f"{progress.prompt:,} prompt and {progress.generated:,} generated tokens in {progress.wall_s:.0f} s"
        f" · {sum(s.samples for s in account.servers):,} samples · Ctrl-C ends",
        "dim",
    )
    return text


def _rate_words(found: tuple[float, float] | None) -> str:
    if found is None:
        return "prompt - generated -"
    return f"prompt {found[0]:.1f}/s generated {found[1]:.1f}/s"


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.0f} ms"


def clean(text: str) -> str:
    """Return the text without what could move the cursor: it comes from elsewhere."""
    return "".join(letter if letter.isprintable() else "�" for letter in text.replace("\t", " "))
