"""What the router costs: decisions of the pure policy, a full session table, and admission through the actor.

    python -m tests.bench.bench_router [policy] [sessions] [admission]

`admission` starts a Ray of its own with the real router and one worker report, and no engine: its load is the subject.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import tracemalloc
from typing import TYPE_CHECKING

from actors.config import AppConfig, RouterConfig
from actors.dispatch import Dispatcher
from actors.messages import Arrival, Lease, Outcome, WorkerReport
from actors.policy import Admission, Limits
from actors.sessions import Place, SessionLimits, SessionTable, pack

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_WORKERS = 8
_RATE = 200
_WARM_UP_S = 5
_SECONDS = 10


def square_s() -> float:
    """CPU seconds in which Python squares a number and adds it: machines differ by more than commits do."""
    count = 1_000_000
    begin = time.process_time()
    sum(number * number for number in range(count))
    return (time.process_time() - begin) / count


def bench_policy(requests: int = 200_000) -> None:
    """Submit and finish requests of named sessions on eight workers."""
    table = SessionTable(SessionLimits(100_000, 10**9, 3600.0, keeps_state=True))
    admission = Admission(Limits(64, 15.0, 10.0, max_kv_share=1.0, home_queue=4, home_wait_s=1.0), table, 0.0)
    for number in range(_WORKERS):
        admission.report(WorkerReport(f'worker-{number}', 'ready', capacity=64), 0.0)
    prefixes = tuple(range(16))
    begin = time.process_time()
    for number in range(requests):
        arrival = Arrival(f'r{number}', 'api', f's{number % 5000}', 60.0, True, 'normal', 2048, 256, 1024, prefixes)
        (lease,) = admission.submit(arrival, 0.0)
        assert isinstance(lease, Lease)
        admission.finish(Outcome(lease.request_id, 'length', end='length', cached_tokens=0), 0.0)
    rate = requests / (time.process_time() - begin)
    what = f'{_WORKERS} workers, named sessions, 16 prefixes each'
    print(f'policy: {rate:,.0f} requests admitted and finished per second of CPU time; {what}')
    print(f'policy: each takes as long as this machine takes for {1 / rate / square_s():.0f} squares and their sum')


def bench_sessions(sessions: int = 1_000_000, history_tokens: int = 64) -> None:
    """Fill a table, and let a tenth of it expire."""
    table = SessionTable(SessionLimits(2 * sessions, 10**12, 3600.0, keeps_state=True))
    place = Place('worker-0', 0)
    history = pack(range(history_tokens))
    tracemalloc.start()
    for number in range(sessions):
        name = f'session-{number:09d}'
        epoch = table.admit(name, place, history_tokens, 0, float(number >= sessions // 10))
        table.remember(name, epoch, bytes(bytearray(history)), float(number >= sessions // 10))
        table.finish(name, epoch, 'length', 0, float(number >= sessions // 10))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f'sessions: {sessions:,} with {history_tokens} tokens each take {used / 2**30:.2f} GiB')
    for now_s, what in ((3600.5, 'a tenth expires'), (3600.6, 'none expires')):
        before = len(table)
        begin = time.perf_counter()
        table.expire(now_s)
        print(f'sessions: {what}: {before - len(table):,} in {1e3 * (time.perf_counter() - begin):.2f} ms')


def bench_admission() -> None:
    """Time `admit` at a steady rate, as an ingress sees it: with its own dispatcher, from another process."""
    import ray
    from ray import serve

    from actors.ray_start import start_ray
    from actors.router import Router

    config = AppConfig.model_validate(
        {
            'model': {'name': 'bench', 'demo': 'tiny'},
            'engine': {'device': 'cpu', 'num_gpu_blocks': 64, 'max_batch_size': 256},
            'metrics': {'port': None},
        }
    )
    start_ray(num_cpus=4)
    options = {'num_cpus': 0.1}
    serve.start(
        http_options={'host': '127.0.0.1', 'port': 0},
        logging_config={'enable_access_log': False},  # as in the files under deploy/
    )
    router = serve.run(
        serve.deployment(Router).options(max_ongoing_requests=10_000, ray_actor_options=options).bind(config)
    )
    try:
        asyncio.run(_admit_steadily(router, config.router))
    finally:
        serve.shutdown()
        ray.shutdown()


async def _admit_steadily(router: DeploymentHandle, config: RouterConfig) -> None:
    dispatcher = Dispatcher(router, router, 'api', config)
    times: list[float] = []

    async def one(number: int) -> None:
        arrival = Arrival(f'r{number}', 'api', f's{number % 500}', 60.0, True, 'normal', 2048, 256, 0, ())
        begin = time.perf_counter()
        lease = await dispatcher.admit(arrival)
        times.append(time.perf_counter() - begin)
        assert isinstance(lease, Lease)
        dispatcher.finish(Outcome(arrival.request_id, 'length', end='length'))

    async def load(seconds: int) -> None:
        times.clear()
        tasks = []
        begin = time.perf_counter()
        for number in range(_RATE * seconds):
            if number % _RATE == 0:
                await router.report.remote(WorkerReport('worker-0', 'ready', capacity=256))
            await asyncio.sleep(max(begin + number / _RATE - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(one(number)))
        await asyncio.gather(*tasks)

    await load(_WARM_UP_S)
    begin = time.perf_counter()
    await load(_SECONDS)
    rate = len(times) / (time.perf_counter() - begin)
    quantiles = statistics.quantiles(times, n=100)
    print(
        f'admission: {rate:.0f} requests/s through one router after {_WARM_UP_S} s of them, '
        f'median {1e3 * quantiles[49]:.1f} ms, p99 {1e3 * quantiles[98]:.1f} ms'
    )


BENCHMARKS = {'policy': bench_policy, 'sessions': bench_sessions, 'admission': bench_admission}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', default=list(BENCHMARKS), help=', '.join(BENCHMARKS))
    for name in parser.parse_args().names:
        BENCHMARKS[name]()


if __name__ == '__main__':
    main()
