// What the page has seen: rates and quantiles of the last while, from counters that only grow.

export const SPAN_S = 120;
const RATE_S = 5;
const LATENCY_S = 60;

export class History {
  #states = [];

  /** Take note of a state; counters that fell mean that the router has started again, and void what was before. */
  add(state) {
    const last = this.#states.at(-1);
    if (last && last.requests.admitted_total > state.requests.admitted_total) this.#states = [];
    this.#states.push(state);
    while (state.time_s - this.#states[0].time_s > SPAN_S) this.#states.shift();
  }

  /** Points of the last SPAN_S seconds, as [seconds before now, value]. */
  points(read) {
    const now = this.#states.at(-1)?.time_s ?? 0;
    return this.#states.map((state, i) => [state.time_s - now, read(state, i)]).filter(([, value]) => value !== null);
  }

  /** Generated tokens per second at every state. */
  tokenRates() {
    return this.points((_, i) => this.#rate(i));
  }

  /** Quantiles in seconds of requests that ended in the last minute, or since the start if there are none. */
  latency(name, quantiles) {
    const now = this.#states.at(-1);
    const then = this.#states.find((state) => now.time_s - state.time_s <= LATENCY_S);
    const { bounds, counts } = now.requests[name];
    const recent = counts.map((value, i) => value - then.requests[name].counts[i]);
    const isRecent = recent.some((value) => value > 0);
    const used = isRecent ? recent : counts;
    return { isRecent, counts: used, values: quantiles.map((q) => quantile(bounds, used, q)) };
  }

  #rate(i) {
    const now = this.#states[i];
    const then = this.#states.findLast((state) => now.time_s - state.time_s >= RATE_S) ?? this.#states[0];
    const span = now.time_s - then.time_s;
    if (span <= 0) return null;
    const before = new Map(then.replicas.map((replica) => [replica.id, replica.generation_tokens_total]));
    let tokens = 0;
    for (const replica of now.replicas) {
      // A replica that is new, or has nothing to say yet, began at zero.
      tokens += Math.max(0, (replica.generation_tokens_total ?? 0) - (before.get(replica.id) ?? 0));
    }
    return tokens / span;
  }
}

/** The value below which a share of a histogram's samples lie, linear within a bucket; null without samples. */
export function quantile(bounds, counts, share) {
  const total = counts.reduce((sum, value) => sum + value, 0);
  if (total === 0) return null;
  let rest = share * total;
  for (let i = 0; i < bounds.length; i += 1) {
    if (counts[i] >= rest && counts[i] > 0) {
      const low = i === 0 ? 0 : bounds[i - 1];
      return low + ((bounds[i] - low) * rest) / counts[i];
    }
    rest -= counts[i];
  }
  return bounds.at(-1);
}
