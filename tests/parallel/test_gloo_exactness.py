"""Gradient and metrics in real gloo processes, replicated and FSDP2, equal those of the rows run one by one.

One launch runs many jobs, start-up being dear. Unequal counts of micro-batches, or of trips through the vision tower,
would hang it, so that its end shows that they are equal.
"""

from dataclasses import asdict, replace
from itertools import chain

import pytest

from parallel.exactness import EXACT, WRONG, Found, Job, Outcome, read_answers
from parallel.launch import launch
from raggedright.check.cases import Able, Case, choices, covering_cases
from raggedright.check.compare import TOLERANCE

pytestmark = pytest.mark.xdist_group("gloo")

MODELS = ("qwen3", "qwen3-moe", "qwen3-vl")
ABLE = Able(critic=("qwen3", "qwen3-moe"), experts=("qwen3-moe",), trees=("qwen3",))
DTYPES = ("float64", "float32")
DP_SIZES, MORE_DP_SIZES = (2, 3), (2, 3, 4)
NUM_ORDINARY = {2: 6, 3: 2}

# So few rows that ranks have padding only, micro-batches no row, and slots images on one side only.
AWKWARD = (
    Job(Case("qwen3", "float64", cut="one"), num_prompts=3, seed=3),
    Job(Case("qwen3-moe", "float64", collate="padded", kl="k3", cut="pipeline"), num_prompts=3, seed=3),
    Job(Case("qwen3-moe", "float64", align="lcm", loss="value", cut="pipeline"), num_prompts=1, seed=0),
    Job(Case("qwen3-moe", "float64", align="lcm", cut="pipeline", experts="balanced"), num_prompts=1, seed=1),
    Job(Case("qwen3-vl", "float64", loss="gspo", loss_agg="session-mean", cut="one"), num_prompts=2, seed=0),
    Job(Case("qwen3-vl", "float64", align="lcm", collate="padded", cut="pipeline"), num_prompts=1, seed=2),
)
AWKWARD_FLOAT32 = (
    Job(Case("qwen3", "float32", align="lcm", collate="padded", loss="value", cut="pipeline"), num_prompts=1, seed=1),
    Job(Case("qwen3-moe", "float32", align="lcm", entropy=True, cut="rows", experts="balanced"), num_prompts=1, seed=1),
    Job(Case("qwen3-vl", "float32", align="lcm", kl="k2", cut="rows"), num_prompts=1, seed=2),
    Job(Case("qwen3-vl", "float32", collate="padded", loss="reinforce", cut="pipeline"), num_prompts=3, seed=1),
)
SITUATIONS = {"padding only", "empty micro-batch", "no image beside images", "idle expert"}


class Launched:
    """What came back from a launch."""

    def __init__(self, jobs: list[Job], *, timeout: float) -> None:
        num_processes = max(job.case.dp for job in jobs)
        answers = launch("parallel.exactness:run_jobs", num_processes, [asdict(job) for job in jobs], timeout=timeout)
        self.outcomes, self.found = read_answers(answers)

    def outcomes_of(self, mode: str, dp: int) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.mode == mode and outcome.job.case.dp == dp]

    def found_at(self, dp: int) -> list[Found]:
        return [found for found in chain.from_iterable(self.found) if found.job.case.dp == dp]


@pytest.fixture(scope="module")
def launched() -> Launched:
    averaging = Job(Case(dp=3), modes=(*EXACT, *WRONG))
    jobs = [job for dp in DP_SIZES for job in (*_awkward(dp), *_ordinary(dp)[: NUM_ORDINARY[dp]])]
    return Launched([*jobs, averaging], timeout=300)


@pytest.mark.parametrize("dp", DP_SIZES)
@pytest.mark.parametrize("mode", EXACT)
def test_gradients_and_metrics_summed_over_ranks_equal_the_reference(launched: Launched, mode: str, dp: int) -> None:
    outcomes = launched.outcomes_of(mode, dp)
    assert {outcome.job.case.model for outcome in outcomes} == set(MODELS)
    assert {outcome.job.case.dtype for outcome in outcomes} == set(DTYPES)
    _check_exact(outcomes)


@pytest.mark.parametrize("dp", DP_SIZES)
def test_the_sample_holds_every_awkward_situation(launched: Launched, dp: int) -> None:
    met: dict[str, set[str]] = {model: set() for model in MODELS}
    for found in launched.found_at(dp):
        if set(EXACT) <= set(found.job.modes):
            met[found.job.case.model].update(found.situations)
    assert set.union(*met.values()) == SITUATIONS
    assert all("padding only" in situations for situations in met.values())
    assert "idle expert" in met["qwen3-moe"]
    assert "no image beside images" in met["qwen3-vl"]


@pytest.mark.parametrize("dp", DP_SIZES)
def test_the_gradient_of_a_rank_with_padding_only_is_zero_and_not_missing(launched: Launched, dp: int) -> None:
    """0 x inf would make it NaN, and a missing one would leave the other ranks of a sharded model waiting."""
    gradients = list(chain.from_iterable(found.padding_gradient for found in launched.found_at(dp)))
    assert gradients
    assert set(gradients) == {"zero"}


def test_every_rank_makes_the_same_plan(launched: Launched) -> None:
    digests: dict[Job, list[str]] = {}
    for found in chain.from_iterable(launched.found):
        digests.setdefault(found.job, []).append(found.digest)
    for job, of_ranks in digests.items():
        assert of_ranks == of_ranks[:1] * job.case.dp


def test_gradients_averaged_over_ranks_are_wrong(launched: Launched) -> None:
    """FSDP and DDP average unasked: the gradient is a dp-th of what it should be."""
    for outcome in launched.outcomes_of("averaged", dp=3):
        assert outcome.rel_error == pytest.approx(1 - 1 / 3)


def test_loss_times_dp_does_not_undo_an_average_exactly(launched: Launched) -> None:
    """The remedy of verl and others: norms and routers cast to float32 inside, where a scaled loss rounds otherwise."""
    scaled, summed = launched.outcomes_of("loss x dp", dp=3), launched.outcomes_of("fsdp2", dp=3)
    assert min(outcome.rel_error for outcome in scaled) > 1e-10
    assert max(outcome.rel_error for outcome in summed if outcome.job.case.dtype == "float64") < 1e-14


@pytest.mark.slow
@pytest.mark.parametrize("dp", MORE_DP_SIZES)
def test_a_larger_sample_is_exact_too(dp: int) -> None:
    """Every pair of choices, half of them sharded too; few rows; the awkward jobs in the other dtype, or in both."""
    ordinary = _ordinary(dp)
    few_rows = [replace(job, num_prompts=2, seed=5, modes=EXACT) for job in _ordinary(dp, seed=1)[:6]]
    awkward = [
        replace(job, case=replace(job.case, dp=dp, dtype="float64" if job.case.dtype == "float32" else "float32"))
        for job in (*AWKWARD, *AWKWARD_FLOAT32)
    ]
    if dp not in DP_SIZES:
        awkward += _awkward(dp)
    launched = Launched([*awkward, *ordinary, *few_rows], timeout=1_200)
    for mode in EXACT:
        _check_exact(launched.outcomes_of(mode, dp))


def _awkward(dp: int) -> list[Job]:
    float32 = AWKWARD_FLOAT32 if dp == 2 else AWKWARD_FLOAT32[-1:]
    return [replace(job, case=replace(job.case, dp=dp)) for job in (*AWKWARD, *float32)]


def _ordinary(dp: int, seed: int = 0) -> list[Job]:
    """Cases in which every pair of choices occurs; the first few of them hold most pairs."""
    options = {**choices(MODELS, (dp,), DTYPES), "rows": ("short",), "ratios": ("near",)}
    cases = covering_cases(options, ABLE, seed=seed)
    return [Job(case, modes=EXACT if number % 2 else EXACT[:1]) for number, case in enumerate(cases)]


def _check_exact(outcomes: list[Outcome]) -> None:
    off = [o for o in outcomes if not max(o.rel_error, o.metric_drift) <= TOLERANCE[o.job.case.dtype]]
    assert not off, "\n".join(map(str, off))
