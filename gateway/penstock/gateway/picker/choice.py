"""The choice: one replica, an ordered list to fall back on, and reasons that a person can read."""

from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from penstock.api.fleet import Replica
from penstock.gateway.picker.candidates import Booked, Candidate, Rejected, ReplicaKey, key_of, why_not
from penstock.gateway.picker.disaggregation import Hop, Joint, join
from penstock.gateway.picker.figures import Floats, at
from penstock.gateway.picker.policies import POLICIES, Policy
from penstock.gateway.picker.ranking import ByCompiledPrice, ByScore, Ranking
from penstock.gateway.picker.slate import Slate
from penstock.gateway.picker.subset import Subset

MAX_ENDPOINTS = 4
"""Length of the fallback list: the pick, and one for each retry of Envoy's route."""
RANKED = 10
"""How many candidates a choice remembers."""
JOINT_POLICY = "Cost"
"""The policy that weighs pairs of prefill and decode replicas; the others choose the latter by themselves."""


class Ranked(msgspec.Struct, frozen=True):
    """A candidate with what a policy makes of it: the least `score` wins."""

    candidate: Candidate
    score: float
    terms: dict[str, float]
    """The figures behind the score."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The decision for a request. It keeps figures only: sentences are made on demand, since few decisions are ever read."""

    policy: str
    replica: Replica
    """The pick."""
    resident_tokens: int
    """Prompt tokens that its prefix cache and its tiers would supply."""
    endpoints: list[str]
    """The ordered list for Envoy: replicas of the pick's pool, since a list cannot cross clusters."""
    whole: Slate
    """All that it was made of; its figures have gone on since."""
    rows: list[int]
    """The best candidates in order of preference."""
    table: Floats
    """Their figures at the moment of the pick, float64 [figures, candidates]."""
    scores: list[float]
    """Theirs."""
    limit: float
    """Scores up to here count as equal to the best."""
    subset: Subset | None
    excluded: Collection[ReplicaKey]
    joint: Joint | None = None
    """The pairs that the best candidates would make, where the model has prefill replicas."""
    hop: Hop | None = None
    """Where the prompt is computed, if not at the pick."""
    ttft_s: float = 0.0
    """The time to the first token that the pick's reports promise; 0 where the policy looks at none, or at two replicas."""

    @property
    def key(self) -> ReplicaKey:
        """Key of the picked replica."""
        return key_of(self.replica)

    @property
    def slate(self) -> Slate:
        """The best candidates alone, in order of preference, as they were."""
        return self.whole.kept(self.rows, self.table)

    @property
    def ranked(self) -> list[Ranked]:
        """The best candidates in order of preference; the head is the pick."""
        joint = self.joint if self.policy == JOINT_POLICY else None
        slate = self.slate
        columns = POLICIES[self.policy].terms(slate) if joint is None else joint.terms(slate)
        terms = {name: column.tolist() for name, column in columns.items()}
        return [
            Ranked(_candidate(slate, row), score, {name: column[row] for name, column in terms.items()})
            for row, score in enumerate(self.scores)
        ]

    @property
    def rejected(self) -> list[Rejected]:
        """The replicas that could not be picked, and why."""
        rejected: list[Rejected] = []
        whole = self.whole
        for replica, could in zip(whole.replicas, whole.open.tolist(), strict=True):
            if replica is not None and not could:
                why = why_not(replica, self.subset, self.excluded)
                rejected.append(Rejected(replica.title, why or f"not known to have adapter {whole.adapter!r}"))
        return rejected

    @property
    def next_best(self) -> tuple[str, float] | None:
        """The second in order of preference, and its score; None where there is no other."""
        return second(self.whole.replicas, self.rows, self.scores)

    @property
    def reasons(self) -> list[str]:
        """Sentences for people."""
        ranked, slate = self.ranked, self.whole
        pick = ranked[0].candidate
        only = len(ranked) == 1
        reasons = [f"{pick.name} is the only candidate" if only else _comparison(ranked[0], ranked[1], self.limit)]
        if slate.request.tokens_unknown is not None:
            reasons.append(f"chosen without residency: {slate.request.tokens_unknown}")
        elif pick.resident_tokens:
            reasons.append(f"{pick.resident_tokens} of {slate.request.prompt_tokens} prompt tokens are resident at {pick.name}")
        else:
            reasons.append(f"none of the {slate.request.prompt_tokens} prompt tokens is resident at {pick.name}")
        if pick.report_age_s is None:
            reasons.append(f"{pick.name} has not reported its load yet; assumed average")
        else:
            reasons.append(
                f"{pick.name} reported {pick.running} running and {pick.waiting} waiting"
                f" {pick.report_age_s:.1f} s ago; {pick.booked.requests} more on their way"
            )
        if self.hop is not None:
            hop = self.hop
            reasons.append(
                f"{hop.replica.title} computes the prompt: {hop.prefill_s:.3g} s and {hop.transfer_s:.3g} s of transfer"
                f" against {hop.local_s:.3g} s at {pick.name}"
            )
        elif self.joint is not None:
            reasons.append(f"{pick.name} computes the prompt itself: {self.joint.why_none(0)}")
        if pick.last_resort:
            reasons.append("every candidate has recently failed to answer; the best of them")
        return reasons


def second(replicas: Sequence[Replica | None], rows: list[int], scores: list[float]) -> tuple[str, float] | None:
    """The second of the best `rows` of `replicas`, and its score; None where there is no other."""
    if len(rows) < 2:
        return None
    replica = replicas[rows[1]]
    assert replica is not None
    return replica.title, scores[1]


def choose(
    slate: Slate,
    policy: str,
    subset: Subset | None = None,
    excluded: Collection[ReplicaKey] = (),
    *,
    prefill: Slate | None = None,
) -> Choice:
    """Rank the rows of `slate`, of which at least one may be picked, by `policy`.

    Args:
        slate: The candidates.
        policy: A name in `POLICIES`.
        subset: The restriction that the slate was made under, for the record.
        excluded: The same for excluded replicas.
        prefill: The candidates that could compute the prompt for the pick.

    Raises:
        ValueError: there is no such policy.
    """
    rule = POLICIES.get(policy)
    if rule is None:
        raise ValueError(f"routing policy {policy!r} does not exist; there are {', '.join(POLICIES)}")
    joint = join(slate, prefill) if prefill is not None else None
    ranking = _ranking(slate, policy, rule, joint)
    rows, scores, limit, ttft_s = ranking.best(None, RANKED)
    best = rows[0]
    hop = joint.hop(best, prefill) if joint is not None and prefill is not None else None
    replica = slate.replicas[best]
    assert replica is not None
    return Choice(
        policy=policy,
        replica=replica,
        resident_tokens=int(slate.found[best]),
        endpoints=_endpoints(slate, ranking, limit, rows, same_layout=hop is not None),
        whole=slate,
        rows=rows,
        table=slate.table.take(rows, axis=1),
        scores=scores,
        limit=limit,
        subset=subset,
        excluded=excluded,
        joint=None if joint is None else joint.kept(np.array(rows)),
        hop=hop,
        ttft_s=ttft_s,
    )


def _ranking(slate: Slate, policy: str, rule: Policy, joint: Joint | None) -> Ranking:
    """What ranks the rows: where only the price counts, in compiled form if there is one."""
    compiled = slate.columns.compiled
    if policy != JOINT_POLICY:
        return ByScore(slate, rule.score(slate), rule.tolerance)
    if joint is not None:
        return ByScore(slate, joint.score, rule.tolerance)
    if compiled is not None:
        return ByCompiledPrice(slate, rule.tolerance, compiled)
    return ByScore(slate, rule.score(slate), rule.tolerance, promised=True)


def _endpoints(slate: Slate, ranking: Ranking, limit: float, rows: list[int], *, same_layout: bool) -> list[str]:
    """The pick's, and those to fall back on in its pool; `same_layout`: only where the transferred KV blocks can be read too."""
    same = rows
    if same_layout or len(slate.columns.pools) > 1:
        pools = at(slate.figures.pool, rows)
        layouts = at(slate.figures.kv_layout, rows) if same_layout else pools
        likes = zip(rows, pools, layouts, strict=True)
        same = [row for row, pool, layout in likes if (pool, layout) == (pools[0], layouts[0])]
        if len(same) < MAX_ENDPOINTS and len(rows) < slate.candidates:  # behind those ranked there may be others like it
            like = slate.figures.pool == pools[0]
            if same_layout:
                like &= slate.figures.kv_layout == layouts[0]
            same = ranking.best(like, MAX_ENDPOINTS, limit).rows
    return [slate.endpoints[row] for row in same[:MAX_ENDPOINTS]]


def _candidate(slate: Slate, row: int) -> Candidate:
    f, replica = slate.figures, slate.replicas[row]
    assert replica is not None
    age = slate.now - float(f.heard_at[row])
    return Candidate(
        key=key_of(replica),
        name=replica.title,
        pool=replica.pool,
        endpoint=replica.endpoint,
        report_age_s=None if np.isinf(age) else age,
        running=int(f.running[row]),
        waiting=int(f.waiting[row]),
        booked=Booked(int(f.booked_requests[row]), int(f.booked_tokens[row])),
        resident_tokens=int(slate.found[row]),
        last_resort=slate.last_resorts is not None and bool(slate.last_resorts[row]),
    )


def _comparison(first: Ranked, second: Ranked, limit: float) -> str:
    """One sentence on why `first` comes before `second`: a tie and what broke it, or the term that differs most."""
    one, other = first.candidate, second.candidate
    a, b = one.name, other.name
    if one.last_resort != other.last_resort:
        return f"{a} before {b}, which has recently failed to answer"
    scores = f"{a} ({first.score:.4g}) before {b} ({second.score:.4g})"
    if second.score <= limit:
        if one.booked.requests != other.booked.requests:
            return f"{scores}: as good as equal, and {a} has fewer requests on their way"
        if one.resident_tokens != other.resident_tokens:
            return f"{scores}: as good as equal, and {a} holds more of the prompt"
        return f"{scores}: as good as equal, by lot"
    mine, others = first.terms, second.terms
    differences = {name: others[name] - value for name, value in mine.items() if name != "ttft_s"}
    name = max(differences, key=lambda term: abs(differences[term]), default="")
    if not name or not differences[name]:
        return scores
    return f"{scores}, mostly by {name}: {mine[name]:.4g} against {others[name]:.4g}"
