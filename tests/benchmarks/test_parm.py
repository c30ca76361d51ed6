import pytest

from benchmarks.papers import parm
from benchmarks.papers.claims import NEAR, of_paper, stated
from benchmarks.papers.parm_testbeds import Span, Testbed, spans_of

B_32 = Testbed("parm-b", 32)


def test_groups_lie_on_the_stated_nodes():
    """With 4 GPUs a node, an ESP group lies in one node; an EP group has a rank there for each ESP group."""
    near = {"mp": Span(2, 2), "esp": Span(2, 2), "ep": Span(16, 2), "ep_esp": Span(32, 4)}
    assert spans_of(2, 2, 32, 4) == near
    assert spans_of(4, 4, 8, 4)["ep"] == Span(2, 1)
    assert spans_of(4, 4, 8, 8)["ep"] == Span(2, 2)


def test_link_rates_follow_from_the_published_beta():
    """A link sends 4 bytes in 0.714 ns. A ring of 4 sends 3 of 4 parts; a gather among 2 sends half."""
    assert B_32.link_bytes_per_s == pytest.approx(4.2017e9, rel=1e-4)
    assert B_32.costs(4, 4)["all_gather", "mp"].beta_s_per_byte == pytest.approx(7.14e-10 / 4)
    assert B_32.costs(2, 4)["all_gather", "mp"].beta_s_per_byte == pytest.approx(7.14e-10 / 4 * 2 / 3)
    # A ring of 4 has three steps, as the published one; a pair has one, and 32 ranks have 31.
    assert B_32.costs(2, 4)["all_gather", "mp"].alpha_s == pytest.approx(1.09e-4 / 3)
    assert B_32.costs(2, 4)["all_to_all", "ep_esp"].alpha_s == pytest.approx(1.09e-4 * 31 / 3)
    # One rank of eight in a node: 7/8 of what each of four GPUs sends passes the NIC.
    assert B_32.costs(4, 4)["all_to_all", "ep"].beta_s_per_byte == pytest.approx(4 * 7 / 8 / 12.5e9)


def test_all_but_two_cells_of_table_iv_are_close_to_the_papers():
    cells = [claim for claim in of_paper("parm") if claim.quantity == "cell"]
    missed = {
        (claim.settings["schedule"], claim.settings["column"])
        for claim in cells
        if abs(parm.cell(0.0, **claim.settings) / claim.low - 1) > NEAR
    }
    assert missed == {("s2", "T-B 16"), ("s1", "T-B 32")}
    assert len(cells) == 48 == parm.num_near(0.0) + 2


def test_the_slowdown_on_testbed_a_is_the_one_that_table_v_gives():
    """The one calibrated number: Parm's milliseconds of BERT-Base in MoE layers on T-A."""
    published = stated("parm", "iteration_ms", model="BERT-Base", column="T-A", schedule="parm")
    published -= parm.published_outside_ms("BERT-Base", "T-A")
    assert 1e3 * parm.moe_s("T-A", "parm") == pytest.approx(published, rel=0.01)
    for model in parm.VOCABULARY:  # both models have the same tokens: Tables IV and V leave the same time
        assert parm.published_outside_ms(model, "T-A") == pytest.approx(203, abs=0.5)
        assert parm.published_outside_ms(model, "T-B 32") == pytest.approx(316, abs=3.5)
