"""Parm's two models (Table V). The paper states only their names, N_MP = N_ESP = 4 and the number of experts.

Assumptions: the published sizes of BERT-Base and of the smallest GPT-2; 8 sequences on a GPU, the maximum of
Table III; sequences of 512 tokens, BERT's longest; experts in place of every feed-forward layer, with its
size; k = 1, f = 1.2. More tokens give larger speed-ups, because start-ups count less: on testbed A the MoE
layers gain 3.17, and 3.93 with 16 times the tokens; on testbed B 5.00 and 5.85.

Both models have the same tokens. This follows from the paper: if the MoE layers of both have the mean
speed-up of Table IV, Table V leaves 203 ms for everything else in both models on testbed A, and 319 and
313 ms on testbed B (``parm_tables.published_outside_ms``). The two base models differ only in their
vocabularies.

Outside the MoE layers, the simulation can count the matrix products of attention and logits, divided by N_MP,
and an all-reduce among the MP ranks in each pass of each attention. It cannot count optimizer, embeddings,
norms and the reduction of gradients. Table V therefore takes the published time
(``parm_tables.iteration_ms``).
"""

from dataclasses import dataclass

from benchmarks.papers.parm.parm_layers import COLUMNS, seconds_of
from benchmarks.papers.parm.parm_seconds import NUM_PASSES
from benchmarks.papers.parm.parm_testbeds import AS_TAKEN, Assumptions, Testbed
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.tensor_schedules import ScheduledLayer

N_MP = N_ESP = 4
SEQUENCES = 8
CAPACITY_FACTOR = 1.2


@dataclass(frozen=True)
class TrainedModel:
    """A base model. Each of its layers has attention and experts.

    Attributes:
        layers: Number of transformer layers.
        hidden: Model dimension, M.
        ffn: Inner dimension of an expert, H.
        length: Number of tokens of a sequence.
        vocabulary: Number of token ids.
    """

    layers: int
    hidden: int
    ffn: int
    length: int
    vocabulary: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a GPU, B·L."""
        return SEQUENCES * self.length


MODELS = {
    "BERT-Base": TrainedModel(12, 768, 3072, 512, 30522),
    "GPT-2": TrainedModel(12, 768, 3072, 512, 50257),
}


def moe_s(model: TrainedModel, column: str, name: str, assumptions: Assumptions = AS_TAKEN) -> float:
    """Return the simulated seconds of an iteration in the MoE layers.

    Args:
        model: Model to simulate.
        column: Column of Table IV, which names testbed and number of GPUs.
        name: ``baseline`` or ``parm``.
        assumptions: Assumptions about unstated values.
    """
    testbed = Testbed(*COLUMNS[column], assumptions)
    layer = ScheduledLayer(
        num_tokens=model.num_tokens,
        hidden_size=model.hidden,
        num_rows=assumptions.top_k * CAPACITY_FACTOR * model.num_tokens,
        n_mp=N_MP,
        n_esp=N_ESP,
        n_ep=testbed.num_devices // N_ESP,
        element_bytes=assumptions.element_bytes,
    )
    seconds: float = getattr(seconds_of(layer, model.ffn, testbed), name).total_s
    return model.layers * seconds


def outside_s(model: TrainedModel, column: str, assumptions: Assumptions = AS_TAKEN) -> float:
    """Return the simulated seconds of an iteration outside the MoE layers.

    Args:
        model: Model to simulate.
        column: Column of Table IV, which names testbed and number of GPUs.
        assumptions: Assumptions about unstated values.
    """
    testbed = Testbed(*COLUMNS[column], assumptions)
    tokens_bytes = model.num_tokens * model.hidden * assumptions.element_bytes
    all_reduce_s = testbed.costs(N_MP, N_ESP)["all_reduce", "mp"].time_s(tokens_bytes)
    return model.layers * NUM_PASSES * all_reduce_s + _dense_s(model, testbed.flops_per_s)


def _dense_s(model: TrainedModel, flops_per_s: float) -> float:
    """Return the seconds of attention and logits, both passes."""
    attention = 8.0 * model.hidden**2 + 4.0 * model.length * model.hidden
    logits = 2.0 * model.hidden * model.vocabulary
    forward = model.num_tokens * (model.layers * attention + logits) / N_MP
    return (1 + BACKWARD_PER_FORWARD) * forward / flops_per_s
