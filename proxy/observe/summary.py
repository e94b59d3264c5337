"""The summary of an observation: as a JSON object, and in words for people. Pure."""

from typing import Any

from proxy.observe.account import Account, Gap, ServerAccount
from proxy.observe.frames import Progress
from proxy.types import EnginePhase

_PREFILL = (EnginePhase.PREFILL_OPEN, EnginePhase.PREFILL_SEALED, EnginePhase.YIELD_PREFILL)


def summarize(account: Account, notes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return everything the observation adds up to; the account must be closed.

    Times (`_s`) count from the observation's begin (`header.started_unix_s`), rates are per second. `combined.rate` is over
    all of its wall time, `combined.busy_rate` over the part in which a slot was at work.
    """
    started = account.header.started_s
    servers = [_server(account, number, server) for number, server in enumerate(account.servers)]
    return {
        "kind": "summary",
        "header": {
            "started_unix_s": account.header.started_unix_s,
            "interval_s": account.header.interval_s,
            "servers": list(account.header.servers),
            "logs": list(account.header.logs),
        },
        "ended": account.end.why if account.end else "cut",
        "combined": _combined(account.progress, account, started),
        "servers": servers,
        "gaps": [_gap(gap, started) for gap in account.gaps],
        "more_gaps": account.more_gaps,
        "log_lines": dict(zip(account.header.logs, account.log_lines, strict=True)),
        "log_notes": [
            {"log": account.header.logs[n.log], "at_s": _s(n.at_s - started), "note": n.note}
            for n in account.log_notes
        ],
        "notes": list(notes),
    }


def _combined(progress: Progress, account: Account, started: float) -> dict[str, Any]:
    frames = progress.frames
    return {
        "wall_s": _s(progress.wall_s),
        "busy_s": _s(progress.busy_s),
        "prompt_tokens": progress.prompt,
        "generated_tokens": progress.generated,
        "rate": _rates(progress.prompt, progress.generated, progress.wall_s),
        "busy_rate": _rates(progress.prompt, progress.generated, progress.busy_s),
        "frames": frames,
        "skew_limit_s": account.skew_limit_s,
        "skew_max_s": _s(progress.skew_max_s),
        "skew_mean_s": _s(progress.skew_sum_s / frames) if frames else 0.0,
        "unpaired_samples": sum(account.unpaired),
        "broken": [{"begin_s": _s(a - started), "end_s": _s(b - started)} for a, b in progress.broken],
    }


def _server(account: Account, number: int, server: ServerAccount) -> dict[str, Any]:
    started, up, point, first = account.header.started_s, server.up, server.point, server.first
    prefill_s = sum(found.seconds for phase, found in server.phases.items() if phase in _PREFILL)
    generate_s = server.phases[EnginePhase.GENERATE].seconds if EnginePhase.GENERATE in server.phases else 0.0
    prompt, generated = (point.prompt, point.generated) if point else (0, 0)
    exclusive = bool(server.native and up and up.policy in ("drain", "yield"))
    return {
        "url": server.name,
        "state": server.mark.state.value if server.mark else "not asked",
        "native": server.native,
        "policy": up.policy if up else "",
        "build": up.build if up else "",
        "series": up.series if up else "",
        "model": up.model if up else "",
        "runs": point.run if point else 0,
        "samples": server.samples,
        "unpaired_samples": account.unpaired[number],
        "longest_request_s": _s(server.longest_request_s),
        "watched_s": _s(point.at_s - first.at_s) if point and first else 0.0,
        "prompt_tokens": prompt,
        "prompt_tokens_unsure": point.unsure if point else 0,
        "prompt_from": sorted(server.prompt_from),
        "generated_tokens": generated,
        "generated_is_least": "samples" in server.generated_from,
        "generated_from": sorted(server.generated_from),
        # what an exclusive phase does, it does alone: only then do these two mean anything
        "prompt_per_prefill_s": _rate(prompt, prefill_s) if exclusive else None,
        "generated_per_generate_s": _rate(generated, generate_s) if exclusive else None,
        "phases": {
            phase.value: {
                "seconds": _s(found.seconds),
                "intervals": found.intervals,
                "longest_s": _s(found.longest_s),
            }
            for phase, found in sorted(server.phases.items())
        },
        "intervals": [
            {"phase": phase.value, "begin_s": _s(begin - started), "end_s": _s(end - started)}
            for phase, begin, end in server.intervals
        ],
        "events": dict(sorted(server.events.items())),
        "events_lost": sum(count for _, _, count in server.lost),
        "lost": [
            {"begin_s": _s(a - started), "end_s": _s(b - started), "events": count}
            for a, b, count in server.lost
        ],
        "notes": list(server.notes),
    }


def _gap(gap: Gap, started: float) -> dict[str, Any]:
    return {
        "server": gap.server,
        "begin_s": _s(gap.begin_s - started),
        "end_s": _s(gap.end_s - started),
        "why": gap.why,
        "tokens_counted": gap.same_run,
    }


def _rates(prompt: int, generated: int, seconds: float) -> dict[str, float | None]:
    return {
        "prompt": _rate(prompt, seconds),
        "generated": _rate(generated, seconds),
        "total": _rate(prompt + generated, seconds),
    }


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 3) if seconds > 0 else None


def _s(seconds: float) -> float:
    return round(seconds, 4)
