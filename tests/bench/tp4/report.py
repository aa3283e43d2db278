"""Figures of arms beside each other; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

Result = Mapping[str, Any]
GIB = 2**30


def compare(ours: Sequence[Result], theirs: Sequence[Result]) -> list[dict[str, Any]]:
    """Compare greedy answers token by token.

    Sums are reordered between ranks, so answers part at near ties; up to there log-probabilities must agree.

    Returns:
        Per answer the first position where tokens differ (None: nowhere), by how much `theirs` prefers its token there
        (None too if it does not list the other one), the share of equal tokens, and the largest and the mean difference
        of the chosen tokens' log-probabilities up to there.
    """
    found = []
    for mine, other in zip(ours, theirs, strict=True):
        pairs = list(zip(mine['tokens'], other['tokens'], strict=True))
        differing = [i for i, (a, b) in enumerate(pairs) if a != b]
        end = differing[0] if differing else len(pairs)
        # JSON has made strings of the token ids.
        gaps = [
            abs(_chosen(mine['logprobs'][i], pairs[i][0]) - _chosen(other['logprobs'][i], pairs[i][1]))
            for i in range(min(end, len(mine['logprobs']), len(other['logprobs'])))
        ]
        margin = None
        if differing and str(pairs[end][0]) in other['logprobs'][end]:
            margin = _chosen(other['logprobs'][end], pairs[end][1]) - _chosen(other['logprobs'][end], pairs[end][0])
        found.append(
            {
                'prompt_tokens': len(mine['prompt']),
                'first_difference': differing[0] if differing else None,
                'margin_there': margin,
                'equal_share': 1 - len(differing) / len(pairs),
                'logprob_max_difference': max(gaps, default=None),
                'logprob_mean_difference': mean(gaps) if gaps else None,
            }
        )
    return found


def _chosen(logprobs: Mapping[Any, float], token: int) -> float:
    return float(logprobs[str(token)] if str(token) in logprobs else logprobs[token])


def lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield what to print of all arms."""
    greedy = [r for r in results if r['arm']['kind'] == 'greedy']
    for one in greedy:
        yield _placement(one)
        if 'recovery' in one:
            yield f'{one["arm"]["name"]}: recovery {one["recovery"]}'
    single = next((r for r in greedy if r['arm']['args']['engine']['tp'] == 1 and 'answers' in r), None)
    for one in greedy:
        if single is None or one is single or 'answers' not in one:
            continue
        for row in compare(one['answers'], single['answers']):
            yield f'{one["arm"]["name"]} against {single["arm"]["name"]}: {row}'
    loads = [r for r in results if r['arm']['kind'] == 'load' and r.get('runs')]
    yield from map(_placement, loads)
    yield 'arm | rounds | tok/s | TTFT s | TPOT s | state GiB a rank | NVML peak GiB a GPU'
    for kind in ('target', 'mtp3'):
        sides = [[r for r in loads if r['arm']['name'].startswith(f'{kind}-{side}-')] for side in ('off', 'on')]
        if all(sides):
            yield _row(kind, *sides)


def _placement(result: Result) -> str:
    peaks = ', '.join(f'{peak / GIB:.2f}' for peak in result['nvml_peak_bytes']) or 'none'
    place = 'rank i on GPU i' if result['ranks_in_place'] else f'OUT OF PLACE {result["gpus"]}'
    accepted = f', accepted {result["accepted_drafts"]}' if result['accepted_drafts'] else ''
    return f'{result["arm"]["name"]}: {place}, ready {result["ready_s"]:.1f} s, NVML peaks GiB {peaks}{accepted}'


def _row(kind: str, off: Sequence[Result], on: Sequence[Result]) -> str:
    def change(key: str) -> str:
        before, after = (mean(run[key] for r in side for run in r['runs']) for side in (off, on))
        return f'{before:.4g} -> {after:.4g} ({after / before - 1:+.2%})'

    def gib(values: Sequence[float | None]) -> str:
        before, after = values
        if before is None or after is None:
            return '-'
        return f'{before / GIB:.3f} -> {after / GIB:.3f} ({(after - before) / GIB:+.3f})'

    state = gib([mean(mean(r['state_bytes']) for r in side) for side in (off, on)])
    peaks = [[r['nvml_peak_mean_bytes'] for r in side if r['nvml_peak_mean_bytes']] for side in (off, on)]
    peak = gib([mean(side) if side else None for side in peaks])
    speeds = [change(key) for key in ('output_tokens_per_s', 'ttft_s', 'tpot_s')]
    return ' | '.join([kind, f'{len(off)}+{len(on)}', *speeds, state, peak])
