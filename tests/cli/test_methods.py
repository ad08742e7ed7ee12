"""`lowbit methods`: every method in a list, and its status, source and domain in full and as JSON."""

from __future__ import annotations

import json

import pytest

from harness.api import Method
from harness.cli.docs_site.docs_pages import methods_text
from harness.cli.methods import STATUSES, domain_lines, methods, status_of
from harness.published.claims.domains import domains_of
from methods import METHODS, OWN
from methods.flashrl import TIS

NEWER = {
    "vcpo": ("exact", "arXiv 2602.17616", ["bf16"]),
    "minirl": ("reconstructed", "arXiv 2512.01374", ["fp8_block, k3 0.0001 to 0.01"]),
    "keep_sampling_mask": ("reconstructed", "arXiv 2512.02556", ["bf16, fp8_block"]),
    "r2vpo": ("reconstructed", "arXiv 2605.26784", ["bf16"]),
    "jackpot": ("reconstructed", "arXiv 2602.06107", ["bf16"]),
    "ipo": ("exact", "prime-rl, ipo_loss_fn", ["any setting"]),
    "sapo": ("exact", "arXiv 2511.20347", ["bf16"]),
    "mipu_step1": ("reconstructed", "arXiv 2606.29526", ["fp8_block"]),
    "dc_grpo": ("reconstructed", "arXiv 2606.08779", ["bf16, fp8_block, learning rate 1e-06"]),
    "alp": ("reconstructed", "arXiv 2603.19470", ["bf16"]),
    "lr_decay": ("reconstructed", "arXiv 2602.01826", ["bf16, fp16, learning rate 1e-06"]),
    "kpop": ("reconstructed", "Ant group, Ring-2.6-1T (2026)", ["any setting"]),
    "mxfp4_rl": ("reconstructed", "arXiv 2605.20402", ["mxfp4_mbs_w4a4, mxfp4_up_w4a4"]),
}
"""Method -> status, source and domain."""


def test_newer_methods_have_status_source_and_domain(capsys: pytest.CaptureFixture[str]) -> None:
    assert methods(list(NEWER), is_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert {name: (row["status"], row["paper"], row["domain"]) for name, row in told.items()} == NEWER


def test_every_method_of_a_paper_has_a_domain_and_controls_have_none() -> None:
    lacking = {name for name, method in METHODS.items() if not domain_lines(method)}
    assert lacking == {n for n, m in METHODS.items() if m.is_control or not m.paper or n.startswith("verl_")}


def test_the_list_fits_a_pipe_and_the_full_text_shows_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    methods([], is_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    heads = [line for line in lines if line and not line.startswith((" ", "Behind", "domain"))]
    assert [head.partition(":")[0] for head in heads] == ["control", "exact", "reconstructed"]
    assert [line.split()[0] for line in lines if line[:2] == "  " and line[2:3] != " "] == sorted(
        METHODS, key=lambda name: list(STATUSES).index(status_of(METHODS[name]))
    )
    at = lines.index("  fp16                  24 times less mismatch than BF16; the sanity run ends at 99 % where BF16")
    assert lines[at - 1] == heads[1] and lines[at + 1] == f"{' ' * 24}collapses"
    methods(["mxfp4_rl"], is_json=False)
    full = capsys.readouterr().out
    assert "    domain         mxfp4_mbs_w4a4, mxfp4_up_w4a4\n" in full
    assert "mxfp4_mbs_w4a4 4.31/4.31, mxfp4_up_w4a4 4.25/4.25" in full
    assert "    reconstructed  the block that sets the mantissa" in full


def test_a_method_of_no_paper_is_shown_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Method(name="mine", parts=(TIS(),), precisions=("int8",), summary="weights of mine")
    assert domains_of(mine.paper) == []
    monkeypatch.setitem(METHODS, "mine", mine)
    monkeypatch.setitem(OWN, "mine", "mine.METHOD")
    methods([], is_json=False)
    assert "\nown: a rule of no paper\n  mine                  weights of mine\n\n" in capsys.readouterr().out
    methods(["mine"], is_json=True)
    told = json.loads(capsys.readouterr().out)["mine"]
    assert (told["paper"], told["status"], told["claim"], told["domain"]) == ("", "own", "", [])
    page = methods_text({"mine": mine})
    assert "- Status: own\n" in page and "Source" not in page
