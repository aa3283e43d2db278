"""Serve on this machine, break things under load, and compare every token with an undisturbed run.

    python -m tests.chaos --duration-s 600

The last line is one JSON object: what clients did, which faults there were, and every invariant that was violated.
The exit status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI
from ray.util import placement_group_table

from actors.config import AppConfig
from tests.actors.service.conftest import Service, serving
from tests.chaos.clients import MODEL, PATIENCE_S, Client, Report, ask_oracles
from tests.chaos.faults import Faults

CLIENTS = 8
WORKERS = 2
RECOVERY_S = 300.0


def config(tp: int) -> AppConfig:
    """Return two workers with prefix checkpoints, drafts and ReplaySSM."""
    return AppConfig.model_validate(
        {
            'model': {'name': MODEL, 'demo': 'tp4' if tp > 1 else 'tiny'},
            'engine': {
                'device': 'cpu',
                'tp': tp,
                'dtype': 'float32',
                'session_len': 2048,
                'max_batch_size': CLIENTS,
                'num_gpu_blocks': 256,
                'block_size': 16,
                'max_prefill_token_num': 256,
                'enable_prefix_caching': True,
                'prefix_cache_state_budget': 16,
                'speculative': {'num_tokens': 3},
            },
            'worker': {'replicas': WORKERS, 'report_period_s': 0.2, 'health_check_period_s': 2.0},
            'router': {'lease_timeout_s': 4.0, 'resume_wait_s': 120.0, 'max_resumes': 10},
            'metrics': {'port': None},
        }
    )


def placement_groups() -> int:
    """Return the number of placement groups that hold resources."""
    return sum(group['state'] == 'CREATED' for group in placement_group_table().values())


def run_chaos(duration_s: float, tp: int = 1, period_s: float = 15.0, seed: int = 0) -> dict[str, Any]:
    """Run clients and faults for a while; return the report as a JSON object."""
    with serving(config(tp)) as service:
        return asyncio.run(_run(service, duration_s, tp > 1, period_s, seed))


async def _run(service: Service, duration_s: float, with_ranks: bool, period_s: float, seed: int) -> dict[str, Any]:
    report, faults = Report(), Faults(period_s, with_ranks, seed)
    await service.until(all_ready, RECOVERY_S)
    groups = placement_groups()
    async with AsyncOpenAI(base_url=f'{service.url}/v1', api_key='none', max_retries=0, timeout=2 * PATIENCE_S) as api:
        oracles = await ask_oracles(api, 12)
        stop, no_more_faults = asyncio.Event(), asyncio.Event()
        clients = [Client(api, f'client-{n}', oracles, report, seed + n).run(stop) for n in range(CLIENTS)]
        work = [asyncio.create_task(client) for client in clients]
        trouble = asyncio.create_task(faults.run(no_more_faults))
        await asyncio.sleep(duration_s)
        no_more_faults.set()
        await trouble
        stop.set()
        await asyncio.gather(*work)
        resumed = await _check_recovery(service, groups, report)
    return {
        'duration_s': duration_s,
        'requests': dict(report.done),
        'refused': dict(report.refused),
        'failed_in_words': dict(report.failed),
        'faults': dict(faults.counts),
        'resumed_since_the_last_router': resumed,
        'violations': dict(report.violations),
        'examples': report.examples,
    }


async def _check_recovery(service: Service, groups: int, report: Report) -> dict[str, int]:
    """Note what does not come back to where it was; return the resumed requests."""
    try:
        stats = await service.until(lambda stats: all_ready(stats) and service.is_idle(stats), RECOVERY_S)
    except TimeoutError:
        stats = await service.stats()
        report.violate('leaked_slots', f'{stats.running} running, {stats.queued} queued, {len(stats.workers)} workers')
    async with asyncio.timeout(RECOVERY_S):
        while placement_groups() > groups:
            await asyncio.sleep(0.5)
    if placement_groups() != groups:
        report.violate('placement_groups', f'{placement_groups()}, before there were {groups}')
    return stats.resumed_total


def all_ready(stats: Any) -> bool:
    """Tell whether all workers are ready."""
    return sum(worker.state == 'ready' for worker in stats.workers) == WORKERS


def main() -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--duration-s', type=float, default=600.0)
    parser.add_argument('--tp', type=int, default=1, help='ranks of a worker; with more than one, ranks are killed too')
    parser.add_argument('--period-s', type=float, default=15.0, help='mean time between two faults')
    parser.add_argument('--seed', type=int, default=0)
    options = parser.parse_args()
    result = run_chaos(options.duration_s, options.tp, options.period_s, options.seed)
    print(json.dumps(result))
    return 1 if result['violations'] else 0


if __name__ == '__main__':
    sys.exit(main())
