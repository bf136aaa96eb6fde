"""What is known of the replicas of one model, in columns: an array a figure, a stable row a replica.

A report, a booking or a change of the fleet writes the one row that it concerns; a pick reads whole columns. So the cost of a
pick is a few dozen array operations, whatever the number of replicas.
"""

from collections.abc import Collection, Sequence
from hashlib import blake2b
from math import exp
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.api.fleet import Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.load.reports import Heard
from penstock.gateway.picker.candidates import Booked, ReplicaKey, key_of
from penstock.gateway.picker.compiled import Compiled
from penstock.gateway.picker.correction import LONGEST_S, corrections, fading
from penstock.gateway.picker.figures import (
    PRIOR_OUTPUT_TOKENS,
    PRIOR_PREFILL_TOKENS_PER_S,
    PRIOR_QUEUE_S,
    PRIOR_STEP_S,
    PRIOR_TRANSFER,
    Bools,
    Figures,
    Floats,
    Rates,
    Rows,
)
from penstock.gateway.picker.folded import Folding, folding
from penstock.gateway.picker.outliers import UNTROUBLED, Standing
from penstock.gateway.picker.price import GRACE_S, itl_s, queue_s
from penstock.gateway.picker.subset import Subset, canonical

PRIOR_ROWS = 256.0
ANSWERS = 64
"""Over how many answers their length is averaged, exponentially."""
LORA_LOAD_S = 0.1
"""Loading an adapter into a slot: 50 MB or so from host memory or disk; a prior, as engines do not measure it."""
LORA_EVICT_S = 0.1
"""What the adapter that has to go will cost when it comes back: so few replicas as possible hold each adapter."""
LORA_WAIT_TOKENS = 128
"""Output tokens after which one of several running adapters is expected to become idle."""
RATES_S = 0.25
"""How old the common rates may be."""
ARRIVALS_S = 5.0
"""Over how long the rate of requests is averaged, exponentially."""

_PROMISED, _TAKEN = Figures._fields.index("promised_s"), Figures._fields.index("taken_s")


class Seats(NamedTuple):
    """The rows as they are from one change of the fleet to the next: what a decision keeps of them."""

    table: Floats
    figures: Figures
    open: Bools
    open_count: int
    seeds: NDArray[np.uint64]
    by_name: Rows
    replicas: Sequence[Replica | None]
    endpoints: Sequence[str]


class Columns:
    """The replicas of one model. Time is an argument (monotonic seconds).

    Args:
        compiled: What prices and ranks them; None: Python.
    """

    def __init__(self, compiled: Compiled | None = None) -> None:
        self.compiled = compiled
        self.table = _blank(0)
        """float64 [figures, rows]."""
        self.figures = Figures(*self.table)
        self.open: Bools = np.zeros(0, np.bool_)
        """Ready, not terminating, not cordoned."""
        self.open_count = 0
        self.seeds: NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Seed of each replica's random draws."""
        self.by_name: Rows = np.zeros(0, np.intp)
        """The rows in the order of their names, blank ones last."""
        self.replicas: Sequence[Replica | None] = ()
        """Replicas by row. Never changed in place, so that a decision may keep it."""
        self.endpoints: Sequence[str] = ()
        self.pools: list[tuple[str, int]] = []
        """Pools by name and data-parallel rank: where one replica cannot be reached, another of its pool may answer in its place,
        on the rank that the request names."""
        self.rows: dict[ReplicaKey, int] = {}
        self.version = 0
        """Rises when `rows` changes."""
        self.adapters: dict[str, set[int]] = {}
        """The rows in which each adapter holds a slot."""
        self.served: dict[int, Collection[str]] = {}
        """By row, the adapters that can be requested. Rows that do not report them are left out."""
        self.troubled: set[int] = set()
        """The rows that may be a last resort now or soon."""
        self.seats = self._seats()
        self._members: list[Replica] = []
        self._output_tokens = PRIOR_OUTPUT_TOKENS
        self._arrived = 0.0
        """Requests that were sent to the replicas, fading."""
        self._rates = Rates()
        self.prices = self._prices()
        """What the figures cost; another one where rows have come or gone."""
        self._rated_at = -np.inf
        self._faded_at = np.inf  # nothing has faded before the first look
        self._able: dict[str, Bools] = {}
        self._rows_at: dict[tuple[str, int], list[int]] = {}
        self._rows_on: dict[str, list[int]] = {}

    def update(self, replicas: Sequence[Replica]) -> None:
        """Takes in what discovery sees now: those that stay keep their rows, a row that is left is blank again."""
        if replicas == self._members:  # a fleet of many models changes in one of them
            return
        self._members = list(replicas)
        current = {key_of(replica): replica for replica in replicas}
        by_row: list[Replica | None] = [None] * len(self.replicas)
        for key in [key for key in self.rows if key not in current]:
            self._clear(self.rows.pop(key))
        for key, row in self.rows.items():
            by_row[row] = current[key]
        free = [row for row, replica in enumerate(by_row) if replica is None]
        for key in [key for key in current if key not in self.rows]:
            row = free.pop(0) if free else len(by_row)
            by_row[row : row + 1] = [current[key]]
            self.rows[key] = row
        self._grow(len(by_row))
        self._index(by_row)

    def _grow(self, count: int) -> None:
        old = self.table.shape[1]
        if count > old:
            self.table = np.concatenate((self.table, _blank(count - old)), axis=1)
            self.figures = Figures(*self.table)

    def _clear(self, row: int) -> None:
        self.table[:, row] = _blank(1)[:, 0]
        self.troubled.discard(row)
        self.served.pop(row, None)
        self._hold(row, ())

    def _index(self, by_row: list[Replica | None]) -> None:
        """Build everything that depends on which replicas there are."""
        self.version += 1
        self.replicas = tuple(by_row)
        self.endpoints = tuple(replica.endpoint if replica else "" for replica in by_row)
        self.open = np.array([r is not None and r.ready and not r.terminating and not r.cordoned for r in by_row], np.bool_)
        self.open_count = int(self.open.sum())
        self.seeds = np.array([_seed(replica) for replica in by_row], np.uint64)
        order = sorted(range(len(by_row)), key=lambda row: _place(by_row[row]))
        self.by_name = np.array(order, np.intp)
        self.pools = sorted({_pool(replica) for replica in by_row if replica})
        self._able, self._rows_at, self._rows_on = {}, {}, {}
        for row, replica in enumerate(by_row):
            if replica:
                self.figures.pool[row] = self.pools.index(_pool(replica))
                self.figures.kv_layout[row] = _layout(replica)
                host = canonical(replica.host)
                self._rows_at.setdefault((host, replica.port), []).append(row)
                self._rows_on.setdefault(host, []).append(row)
        self._rated_at = -np.inf
        self.prices = self._prices()
        self.seats = self._seats()

    def _prices(self) -> Folding:
        return folding(self.compiled, self.table, self.seeds, self.open, self.rows)

    def _seats(self) -> Seats:
        return Seats(
            *(self.table, self.figures, self.open, self.open_count, self.seeds, self.by_name, self.replicas, self.endpoints)
        )

    # --- what becomes known ---

    def heard(self, row: int, heard: Heard) -> None:
        """The newest report of the replica in `row`."""
        if not isinstance(heard.newest, LoadReport):
            prices: Any = self.prices  # compiled, as what has read the report
            rates = self._rates.prefill_tokens_per_s, self._rates.step_s
            if prices.report(row, heard.newest, heard.at, rates, PRIOR_TRANSFER):
                return
        self.report(row, heard.report, heard.at)

    def report(self, row: int, report: LoadReport, at: float) -> None:
        """The newest report of the replica in `row`, received at `at`."""
        f, running = self.figures, report.num_requests_running
        if f.heard_at[row] == -np.inf:
            self._rated_at = -np.inf  # the first word of a replica changes what all of them show
        f.heard_at[row] = at
        f.running[row], f.batch[row], f.waiting[row] = running, running, report.waiting
        f.rows[row] = report.max_num_seqs
        f.rows_free[row] = report.max_num_seqs - running if report.max_num_seqs else np.inf
        f.kv_usage[row] = report.kv_cache_usage_perc
        total = report.kv_blocks_total
        f.kv_blocks[row] = total
        f.blocks_free[row] = report.kv_blocks_reclaimable if total else np.inf
        f.held_blocks[row] = report.kv_cache_usage_perc * total / running if running else 0.0
        f.backlog_tokens[row] = report.prefill_backlog_tokens
        f.measured_tokens_per_s[row] = report.prefill_tokens_per_s
        f.measured_step_s[row] = report.decode_step_s
        measured = report.transfer_s, report.transfer_s_per_token
        f.transfer_s[row], f.transfer_s_per_token[row] = measured if any(measured) else PRIOR_TRANSFER
        if report.lora_slots or f.lora_slots[row]:
            f.lora_slots[row], f.lora_free[row] = report.lora_slots, report.lora_slots_free
            f.lora_idle[row] = sum(not requests for requests in report.lora_running.values())
            self._hold(row, report.lora_running)
        f.s_per_token[row] = 1 / max(report.prefill_tokens_per_s or self._rates.prefill_tokens_per_s, 1.0)
        f.step_s[row] = report.decode_step_s or self._rates.step_s
        self.prices.mark(row)

    def finished(self, output_tokens: int) -> None:
        """An answer of this length has ended at one of the replicas."""
        self._output_tokens += (output_tokens - self._output_tokens) / ANSWERS

    def first_token(self, row: int, promised_s: float, taken_s: float) -> None:
        """A first token of the replica in `row` took `taken_s` seconds, where its reports promised `promised_s`."""
        self.figures.promised_s[row] += min(promised_s, LONGEST_S)
        self.figures.taken_s[row] += min(taken_s, LONGEST_S)

    def trust_again(self, row: int) -> None:
        """Reset what was learned about the replica in `row`: it is a new process."""
        f = self.figures
        f.promised_s[row], f.taken_s[row], f.correction[row] = 0.0, 0.0, 1.0
        self.prices.mark(row)

    def _hold(self, row: int, adapters: Collection[str]) -> None:
        """The adapters that hold slots in `row`."""
        for name in [name for name, rows in self.adapters.items() if row in rows and name not in adapters]:
            self.adapters[name].discard(row)
            if not self.adapters[name]:
                del self.adapters[name]
        for name in adapters:
            self.adapters.setdefault(name, set()).add(row)

    def lora_s(self, adapter: str) -> Floats:
        """Seconds until `adapter` is in a slot, by row: none where it is already, the time to load it where a slot is free, more
        where another adapter has to go, most where all of them are in use. Replicas that say nothing of slots count alike."""
        f = self.figures
        wait = np.where(f.lora_idle > 0, LORA_EVICT_S, LORA_EVICT_S + LORA_WAIT_TOKENS * f.step_s)
        seconds = np.where(f.lora_slots > 0, LORA_LOAD_S + np.where(f.lora_free > 0, 0.0, wait), 0.0)
        seconds[list(self.adapters.get(adapter, ()))] = 0.0
        return seconds

    def serves(self, row: int, adapters: Collection[str] | None) -> None:
        """Requests can ask the replica in `row` for these adapters; None: for all that anybody knows."""
        if adapters is None:
            self.served.pop(row, None)
        else:
            self.served[row] = adapters
        self._able = {}

    def able(self, adapter: str) -> Bools:
        """Return the open rows that serve `adapter`. Returns `open` itself if all do, so that an adapter that is everywhere costs
        nothing. Computed again when a replica reports other adapters."""
        mask = self._able.get(adapter)
        if mask is None:
            has = [row not in self.served or adapter in self.served[row] for row in range(len(self.open))]
            mask = self.open & np.array(has, np.bool_)
            self._able[adapter] = mask = self.open if int(mask.sum()) == self.open_count else mask
        return mask

    def booked(self, row: int, booked: Booked) -> None:
        """Work sent to the replica in `row` that its reports do not hold yet."""
        self.figures.booked_requests[row] = booked.requests
        self.figures.booked_tokens[row] = booked.prefill_tokens
        self.figures.booked_transfers[row] = booked.transfer_tokens
        self.prices.mark(row)

    def sent(self) -> None:
        """A request was sent to one of the replicas."""
        self._arrived += 1

    def left(self, row: int) -> None:
        """Count one running request less in `row`: it ended after the replica's last report. A replica that is not polled reports
        again only with its next request."""
        f = self.figures
        if f.running[row] > 0:
            f.running[row] -= 1
            f.rows_free[row] += 1
            self.prices.mark(row)

    def stand(self, row: int, standing: Standing) -> None:
        """How far the replica in `row` is trusted with requests."""
        if standing == UNTROUBLED and row not in self.troubled:
            return
        self.figures.ejected_until[row], self.figures.allowance[row] = standing
        (self.troubled.discard if standing == UNTROUBLED else self.troubled.add)(row)

    def last_resorts(self, now: float) -> Bools | None:
        """The rows to pick only where there is no other; None where there are none."""
        if not self.troubled:
            return None
        f = self.figures
        mask = (f.ejected_until > now) | (f.booked_requests >= f.allowance)
        return mask if mask.any() else None

    # --- what a pick asks ---

    def rates(self, now: float) -> Rates:
        """Return the common rates: medians over replicas that have measured theirs, computed again every `RATES_S`."""
        if now - self._rated_at >= RATES_S:
            self._rated_at, self._rates = now, self._measure(now)
        return self._rates

    def folded(self, now: float, block_size: int) -> Floats:
        """What a pick for prompts in blocks of `block_size` costs; see `Folding.table`."""
        return self.prices.table(self.rates(now), block_size, now)

    def _measure(self, now: float) -> Rates:
        f = self.figures
        prefill = _median(f.measured_tokens_per_s, PRIOR_PREFILL_TOKENS_PER_S)
        step = _median(f.measured_step_s, PRIOR_STEP_S)
        f.s_per_token[f.measured_tokens_per_s == 0] = 1 / max(prefill, 1.0)
        unmeasured = f.measured_step_s == 0
        f.step_s[unmeasured] = step
        past_s = max(now - self._faded_at, 0.0)
        self.table[[_PROMISED, _TAKEN]] *= fading(past_s)
        self._arrived *= exp(-past_s / ARRIVALS_S)
        self._faded_at = now
        f.correction[:] = corrections(f.promised_s, f.taken_s)
        fresh = now - f.heard_at <= GRACE_S
        queues: list[float] = queue_s(f, now, np.maximum)[fresh].tolist()
        itls: list[float] = itl_s(f, 0.0, np.maximum)[fresh].tolist()
        heard = f.heard_at > -np.inf
        requests: list[float] = (f.running + f.waiting)[heard].tolist()
        return Rates(
            prefill,
            step,
            queue_s=fmean(queues) if queues else PRIOR_QUEUE_S,
            itl_s=fmean(itls) if itls else step,
            output_tokens=self._output_tokens,
            requests=fmean(requests) if requests else 0.0,
            arrivals=self._arrived / ARRIVALS_S / max(self.open_count, 1),
        )

    def eligible(self, subset: Subset | None, excluded: Collection[ReplicaKey], adapter: str | None = None) -> Bools:
        """The rows that may be picked; see `Choice.rejected` for the reasons of the others."""
        able = self.open if adapter is None else self.able(adapter)
        if subset is None and not excluded:
            return able
        mask = able.copy()
        if subset is not None:
            allowed = np.zeros(len(mask), np.bool_)
            for host in subset.hosts:
                allowed[self._rows_on.get(host, [])] = True
            for endpoint in subset.endpoints:
                allowed[self._rows_at.get(endpoint, [])] = True
            mask &= allowed
        for key in excluded:
            if key in self.rows:
                mask[self.rows[key]] = False
        return mask


def _blank(count: int) -> Floats:
    table = np.zeros((len(Figures._fields), count))
    figures = Figures(*table)
    figures.heard_at[:] = -np.inf
    figures.rows_free[:] = figures.blocks_free[:] = figures.allowance[:] = np.inf
    figures.ejected_until[:] = -np.inf
    figures.s_per_token[:] = 1 / PRIOR_PREFILL_TOKENS_PER_S
    figures.step_s[:] = PRIOR_STEP_S
    figures.transfer_s[:], figures.transfer_s_per_token[:] = PRIOR_TRANSFER
    figures.correction[:] = 1.0
    return table


def _seed(replica: Replica | None) -> int:
    if replica is None:
        return 0
    text = f"{replica.uid}/{replica.port}{'' if replica.rank is None else f'/{replica.rank}'}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest())


def _layout(replica: Replica) -> float:
    """48 bits, which a float64 holds exactly."""
    return float(int.from_bytes(blake2b(replica.kv_layout.encode(), digest_size=6).digest())) if replica.kv_layout else 0.0


def _pool(replica: Replica) -> tuple[str, int]:
    return replica.pool, replica.rank or 0


def _place(replica: Replica | None) -> tuple[bool, str, str, int, int]:
    return (False, replica.name, replica.uid, replica.port, replica.rank or 0) if replica else (True, "", "", 0, 0)


def _median(values: Floats, prior: float) -> float:
    measured: list[float] = values[values > 0].tolist()
    return median(measured) if measured else prior
