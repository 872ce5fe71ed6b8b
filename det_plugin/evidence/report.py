"""A self-contained HTML report: which modes agree, and a picture of where answers split.

One file, no scripts, no network: the pictures are inline SVG.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from det_plugin.evidence.divergence import CAUSE_TEXT
from det_plugin.evidence.results import GroupResult, ModeResult, Variant, VerificationResult

MAX_COLUMNS = 100
"""Token positions drawn per answer."""
MAX_GROUPS = 3
"""Requests drawn per mode and server: those that split first, then the others."""

_CELL, _GAP, _LABEL = 9, 1, 250
_COLOURS = {"same": "#2e9e6b", "logprob": "#e8a33d", "token": "#d6455d"}

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; margin: .6rem 0; }
th, td { border: 1px solid var(--line); padding: .3rem .7rem; text-align: left; vertical-align: top; }
.same { color: #1d7f53; } .different { color: #d6455d; font-weight: 600; } .not_tested { color: #b7791f; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 1.2rem; }
.side { border: 1px solid var(--line); border-radius: 6px; padding: .6rem .9rem; overflow-x: auto; }
.answer { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; background: var(--soft);
  padding: .4rem .6rem; border-radius: 4px; margin: .3rem 0; }
.split { background: #d6455d44; border-bottom: 2px solid #d6455d; }
.note { opacity: .75; font-size: .9rem; } svg text { fill: currentColor; font: 11px system-ui, sans-serif; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 1em; }
@media (prefers-color-scheme: dark) { .same { color: #58c793; } }
"""


def _escape(value: Any) -> str:
    return html.escape(str(value), quote=True)


def _cell_kind(reference: Variant, variant: Variant, index: int) -> str:
    if index >= len(reference.token_ids) or reference.token_ids[index] != variant.token_ids[index]:
        return "token"
    return "same" if reference.logprobs[index].hex() == variant.logprobs[index].hex() else "logprob"


def _tooltip(variant: Variant, index: int) -> str:
    text = f" {variant.tokens[index]!r}" if index < len(variant.tokens) and variant.tokens[index] else ""
    return f"index {index}: token {variant.token_ids[index]}{text}, logprob {variant.logprobs[index]!r}"


def split_picture(group: GroupResult) -> str:
    """An SVG with one row per distinct answer and one cell per token, coloured by what differs.

    Green: token and logprob equal the reference's bit for bit; amber: the same token with another logprob;
    red: another token.
    """
    columns = min(MAX_COLUMNS, max((len(v.token_ids) for v in group.variants), default=0))
    pitch = _CELL + _GAP
    row = _CELL + 13
    width, height = _LABEL + columns * pitch + 4, len(group.variants) * row + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{_escape(_summary(group))}">'
    ]
    for k, variant in enumerate(group.variants):
        y = 4 + k * row
        label = f"{variant.count} x {variant.where}"
        if len(label) > 44:
            label = label[:43] + "…"
        parts.append(f'<text x="0" y="{y + _CELL}">{_escape(label)}</text>')
        for index in range(min(columns, len(variant.token_ids))):
            kind = _cell_kind(group.variants[0], variant, index)
            parts.append(
                f'<rect x="{_LABEL + index * pitch}" y="{y}" width="{_CELL}" height="{_CELL}" rx="1.5" '
                f'fill="{_COLOURS[kind]}"><title>{_escape(_tooltip(variant, index))}</title></rect>'
            )
    y = 4 + len(group.variants) * row
    for index in range(0, columns, 10):
        parts.append(f'<text x="{_LABEL + index * pitch}" y="{y + 9}" opacity="0.6">{index}</text>')
    parts.append("</svg>")
    return "".join(parts)


def _summary(group: GroupResult) -> str:
    return f"{group.label}: {group.total} samples, {group.unique} unique"


def _answer(variant: Variant) -> str:
    """The answer's text, with the part after the split marked."""
    index = variant.divergence.token_index if variant.divergence else None
    if index is None or not variant.tokens or not all(variant.tokens):
        body = _escape(variant.text)
    else:
        before, after = "".join(variant.tokens[:index]), "".join(variant.tokens[index:])
        body = f'{_escape(before)}<span class="split">{_escape(after)}</span>'
    return f'<div class="answer">{body}</div>'


def _group_html(group: GroupResult) -> str:
    parts = [f"<p>{_escape(_summary(group))}</p>", split_picture(group)]
    if group.first_divergence is not None:
        lines = "\n".join(group.first_divergence.lines())
        parts.append(f'<div class="answer">{_escape(lines)}</div>')
    shown: set[tuple[int, ...]] = set()
    for variant in group.variants:
        ids = tuple(variant.token_ids)
        if variant.text and ids not in shown and len(shown) < 4:
            shown.add(ids)
            parts.append(_answer(variant))
    return "".join(parts)


def _mode_side(label: str, mode: ModeResult | None) -> str:
    head = f"<h3>{_escape(label)}</h3>"
    if mode is None:
        return f'<div class="side">{head}<p class="not_tested">not run</p></div>'
    groups = sorted(mode.groups, key=lambda g: (g.unique == 1, -g.unique))[:MAX_GROUPS]
    body = "".join(_group_html(group) for group in groups)
    if mode.reason:
        body = f'<p class="not_tested">{_escape(mode.reason)}</p>' + body
    if mode.kl is not None:
        body = f"<p>KL between decoding and prefill: {mode.kl:.3e} nats per token</p>" + body
    if len(mode.groups) > len(groups):
        body += f'<p class="note">{len(mode.groups) - len(groups)} more requests not drawn</p>'
    return f'<div class="side">{head}{body}</div>'


def _cell(mode: ModeResult | None) -> str:
    if mode is None:
        return '<td class="not_tested">not run</td>'
    if mode.status == "not_tested":
        return f'<td class="not_tested">not tested<br><span class="note">{_escape(mode.reason)}</span></td>'
    speed = f'<br><span class="note">{mode.tokens_per_s:.0f} output tokens/s, {mode.elapsed_s:.1f} s</span>'
    return (
        f'<td class="{mode.status}">{mode.unique} unique in {mode.total} samples '
        f"of {len(mode.groups)} requests{speed}</td>"
    )


def _find(result: VerificationResult, key: tuple[str, float]) -> ModeResult | None:
    return next((m for m in result.modes if (m.mode, m.temperature) == key), None)


def _bench_html(bench: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{_escape(case.get('case', ''))}</td><td>{_number(case.get('stock'))}</td>"
        f"<td>{_number(case.get('deterministic'))}</td><td>{_number(case.get('ratio'), 3)}</td>"
        f"<td>{_escape(case.get('unit', ''))}</td></tr>"
        for case in bench.get("cases", [])
    )
    return (
        "<h2>Speed</h2><table><tr><th>case</th><th>stock</th><th>deterministic</th><th>ratio</th><th>unit</th>"
        f"</tr>{rows}</table>"
    )


def _number(value: Any, digits: int = 1) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "–"


def render_html(
    results: Mapping[str, VerificationResult],
    *,
    title: str = "Is the answer the same?",
    notes: Sequence[str] = (),
    bench: Mapping[str, Any] | None = None,
) -> str:
    """Render verifications side by side.

    Args:
        results: label (``"stock"``, ``"deterministic"``) -> result, in the order of the columns.
        title: heading.
        notes: lines of text below the heading.
        bench: a benchmark's JSON (``{"cases": [...]}``), shown as a table.

    Returns:
        One HTML document that needs no other file.
    """
    keys = list(dict.fromkeys((m.mode, m.temperature) for r in results.values() for m in r.modes))
    head = "".join(f"<th>{_escape(label)}</th>" for label in results)
    rows = "".join(
        f"<tr><td>{_escape(mode)}</td><td>{temperature:g}</td>"
        + "".join(_cell(_find(result, (mode, temperature))) for result in results.values())
        + "</tr>"
        for mode, temperature in keys
    )
    parts = [f"<h1>{_escape(title)}</h1>"]
    parts += [f"<p>{_escape(note)}</p>" for note in notes]
    parts += [f'<p class="not_tested">{_escape(n)}: {_escape(r.error)}</p>' for n, r in results.items() if r.error]
    parts.append(f"<table><tr><th>mode</th><th>temperature</th>{head}</tr>{rows}</table>")
    if bench is not None:
        parts.append(_bench_html(bench))
    legend = "".join(
        f'<span class="key" style="background:{_COLOURS[kind]}"></span>{text}'
        for kind, text in (
            ("same", "token and logprob equal to the reference, bit for bit"),
            ("logprob", "same token, another logprob"),
            ("token", "another token"),
        )
    )
    parts.append(
        "<h2>Where answers split</h2><p>One row per distinct answer, one cell per generated token; the first row "
        f"is the reference.{legend}</p>"
    )
    for mode, temperature in keys:
        sides = "".join(_mode_side(label, _find(r, (mode, temperature))) for label, r in results.items())
        parts.append(f'<h2>{_escape(mode)}, temperature {temperature:g}</h2><div class="sides">{sides}</div>')
    causes = "".join(f"<li>{_escape(text)}</li>" for text in CAUSE_TEXT.values())
    parts.append(f'<h2>How to read a divergence</h2><ul class="note">{causes}</ul>')
    facts = "".join(
        f"<tr><td>{_escape(label)}</td><td>{_escape(r.base_url)}</td><td>{_escape(r.server)}</td>"
        f"<td>{_escape(r.options)}</td></tr>"
        for label, r in results.items()
    )
    parts.append(
        "<h2>Protocol</h2><table class='note'><tr><th></th><th>server</th><th>facts</th><th>options</th></tr>"
        f"{facts}</table>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def write_report(
    path: str | os.PathLike[str],
    results: Mapping[str, VerificationResult],
    *,
    title: str = "Is the answer the same?",
    notes: Sequence[str] = (),
    bench: Mapping[str, Any] | None = None,
) -> Path:
    """Write :func:`render_html` to ``path`` (folders are made); returns the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render_html(results, title=title, notes=notes, bench=bench), encoding="utf-8")
    return target
