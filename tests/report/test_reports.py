"""Reports: every figure that the data allows, one file, nothing from elsewhere, and no run that breaks them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_replay.cli.main import main
from moe_replay.errors import MissingExtraError
from moe_replay.records import Completion
from moe_replay.report.attribution_report import write_attribution_report
from moe_replay.report.compare import write_comparison
from moe_replay.report.plots import render
from moe_replay.report.record import ReportError
from moe_replay.report.run_report import write_run_report
from moe_replay.train.output.completions import write_completions
from moe_replay.verification.attribution import Attribution
from tests.report.folders import (
    ATTRIBUTION_FIGURES,
    FIGURES,
    Tags,
    attribution,
    write_run,
)

pytest.importorskip("matplotlib", reason="figures need matplotlib")
pytestmark = pytest.mark.slow

LARGEST = 1_500_000  # bytes of a page


def check_stands_alone(page: Path) -> Tags:
    """One file, with nothing from elsewhere, no script, and ids that are its own."""
    text = page.read_text()
    found = Tags(text)
    assert len(text.encode()) < LARGEST
    assert "http:" not in text
    assert "https:" not in text
    assert not {"script", "link", "iframe", "object", "embed"} & {tag for tag, _ in found.tags}
    for _, given in found.tags:
        assert "src" not in given
        assert not [name for name in given if name.startswith("on")]
        for name in ("href", "xlink:href"):
            assert (given.get(name) or "#").startswith(("#", "data:image/png;base64,"))
    assert "@import" not in text
    assert text.count("url(") == text.count("url(#")
    assert len(found.ids) == len(set(found.ids))
    return found


def check_png(path: Path) -> None:
    """A figure that can be read, with something on white ground."""
    from matplotlib.image import imread

    pixels = imread(path)
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 800
    assert (pixels[0, 0, :3] == 1).all()
    assert np.ptp(pixels[..., :3]) > 0.5


# ---- everything ------------------------------------------------------------------------------------------------------


def test_a_full_run_has_every_figure_in_the_page_and_as_png(full_page: Path) -> None:
    found = check_stands_alone(full_page)
    assert found.titles == FIGURES | ATTRIBUTION_FIGURES
    assert sum(tag == "svg" for tag, _ in found.tags) == len(found.titles)
    figures = {path.stem: path for path in (full_page.parent / "figures").glob("*.png")}
    assert set(figures) == found.titles
    for path in figures.values():
        check_png(path)


def test_the_colours_of_figures_are_those_of_the_page(full_page: Path) -> None:
    text = full_page.read_text()
    figures = text[text.index("<svg") :]
    assert "stroke: var(--replayed)" in figures
    assert "stroke: var(--native)" in figures
    assert "fill: currentColor" in figures or "stroke: currentColor" in figures
    assert "#0072b2" not in figures
    assert "prefers-color-scheme: dark" in text


def test_the_text_of_figures_is_text(full_page: Path) -> None:
    text = Tags(full_page.read_text()).text
    for word in ("without replay", "with replay", "layer", "fraction of tokens", "shift in tokens", "0.97"):
        assert word in text


def test_the_head_says_what_the_run_was_and_what_replay_did(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "mismatch/rollout_vs_old/k3_kl": 5.0},
        {"step": 2, "mismatch/rollout_vs_old/k3_kl": 0.001, "mismatch/rollout_vs_native/k3_kl": 0.02},
    ]
    text = Tags(write_run_report(write_run(tmp_path / "run", lines)).read_text()).text
    assert "tiny/model" in text
    assert "sampled with transformers (bfloat16)" in text
    assert "R3: routes recorded in the rollout are replayed (as configured)" in text
    # step 1 has nothing to compare with, and counts on neither side
    assert "was 0.02 per token with native routing and 0.001 with the rollout's routes replayed: 20 times lower" in text


def k3_lines(native: list[float], replayed: list[float]) -> list[dict]:
    return [
        {"step": step, "mismatch/rollout_vs_old/k3_kl": b, "mismatch/rollout_vs_native/k3_kl": a, "reward/mean": step}
        for step, (a, b) in enumerate(zip(native, replayed, strict=True), 1)
    ]


def test_medians_stand_beside_means_and_few_steps_are_said_to_be_few(tmp_path: Path) -> None:
    lines = k3_lines([0.01, 0.01, 0.13], [0.01, 0.01, 0.01])
    text = Tags(write_run_report(write_run(tmp_path / "run", lines)).read_text()).text
    assert "was 0.05 per token with native routing and 0.01 with the rollout's routes replayed: 5 times lower" in text
    assert "The medians over steps were 0.01 and 0.01: about the same" in text
    assert "measured in 3 steps, too few to generalize from" in text
    assert "Native routing and replay are level here" in text  # at the median


def test_sentence_card_and_table_have_the_same_end(tmp_path: Path) -> None:
    lines = k3_lines([0.02] * 20, [0.001] * 20)  # rewards 1 to 20: the last tenth are 19 and 20
    text = Tags(write_run_report(write_run(tmp_path / "run", lines)).read_text()).text
    assert "went from 1.5 at the start to 19.5 at the end (means of the first and of the last 2 steps)" in text
    assert "reward 19.5 end: mean of 2" in text
    assert "reward/mean 1.5 19.5 10.5 1 20 20" in text
    assert "too few" not in text
    assert "are level here" not in text


def test_auto_is_told_as_the_trainer_resolved_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "mismatch/rollout_vs_old/k3_kl": 0.5}], mode="auto")
    text = Tags(write_run_report(run).read_text()).text
    assert "R3: routes recorded in the rollout are replayed (4 updates from sample to use" in text


# ---- little, broken, hostile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "figures"),
    [
        ([{"step": 7}], set()),
        ([{"step": 1, "reward/mean": None}], set()),
        ([{"step": 1, "reward/mean": 0.5, "time/step": 2.0, "time/rollout": 1.0}], {"reward", "time"}),
        ([{"step": 1, "loss/grad_norm": 0.0}, {"step": 2, "loss/grad_norm": 3.0}], {"grad-norm"}),
        ([{"step": 1, "loss/grad_norm": 0.0}, {"step": 2, "loss/grad_norm": 0.0}], {"grad-norm"}),
        ([{"step": 1, "loss/total": 1.0}, {"step": 2, "loss/total": None}, {"step": 4, "loss/total": 2.0}], {"loss"}),
        ([{"step": 3, "routing/agreement/layer_004": 1.0}], {"agreement-layers"}),
        ([{"step": 1, "completion/length_mean": 3.0}], {"length"}),
    ],
)
def test_little_data_makes_a_small_report(tmp_path: Path, lines: list[dict], figures: set[str]) -> None:
    run = write_run(tmp_path / "run", lines)
    if lines == [{"step": 7}]:
        with pytest.raises(ReportError, match="not finished a step"):
            write_run_report(run)
        return
    assert check_stands_alone(write_run_report(run)).titles == figures


def test_a_run_without_config_or_with_one_of_another_release(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 1.0}])
    (run / "config.toml").write_text('steps = 3\nnew_thing = 1\n[replay]\nmode = "r3"\n')
    assert "R3: routes recorded in the rollout" in Tags(write_run_report(run).read_text()).text
    (run / "config.toml").write_text('new_thing = 1\n[replay]\nmode = "off"\n')
    assert "No routing replay (as configured)." in Tags(write_run_report(run).read_text()).text
    (run / "config.toml").unlink()
    assert "Routing replay: unknown" in Tags(write_run_report(run).read_text()).text


def test_warnings_name_what_is_wrong(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss/total": 1.0, "loss/skipped": 0, "routing/aligned": 1},
        {"step": 2, "loss/total": None, "loss/skipped": 2, "routing/aligned": 0, "routing/agreement/layer_012": 0.31},
    ]
    run = write_run(tmp_path / "run", lines)
    (run / "config.toml").write_text("steps = 5\n")
    text = Tags(write_run_report(run).read_text()).text
    assert "after step 2 of 5" in text
    assert "2 updates were skipped because their gradient was not finite (step 2)" in text
    assert "Non-finite values in step 2: loss/total." in text
    assert "Misaligned routes were found in step 2" in text
    assert "layer 12 with 31%" in text
    assert "Look at this first: Misaligned routes were found in step 2" in text
    assert "(3 more warnings below)" in text


def test_the_verdict_on_a_failed_run_is_its_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 3, "reward/mean": 1.0, "loss/skipped": 1}])
    (run / "config.toml").write_text("steps = 5\n")
    (run / "failure.txt").write_text("the rollout's routes are one token late\n")
    text = Tags(write_run_report(run).read_text()).text
    assert "Look at this first: The run failed after step 3: the rollout's routes are one token late" in text
    assert "still running" not in text
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ReportError, match="not finished a step yet; it failed: the rollout's routes are one token"):
        write_run_report(run)


def test_a_page_that_is_followed_reloads_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 1.0}])
    assert 'http-equiv="refresh" content="10"' in write_run_report(run, reload_s=10).read_text()
    assert "refresh" not in write_run_report(run).read_text()


def test_a_run_that_went_well_has_no_warnings(tmp_path: Path) -> None:
    step = {"loss/skipped": 0, "routing/agreement/layer_001": 0.97}
    lines = [{"step": 1, "routing/aligned": None, **step}, {"step": 2, "routing/aligned": 1, **step}]
    text = Tags(write_run_report(write_run(tmp_path / "run", lines)).read_text()).text
    assert "Warnings" not in text
    assert "Healthy: routes aligned in all 1 steps with enough tokens to tell" in text


def test_an_attribution_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 1.0}])
    (run / "attribution.json").write_text('{"format": 99}')
    found = Tags(write_run_report(run).read_text())
    assert found.titles == {"reward"}
    assert "attribution.json is not shown" in found.text


def test_files_that_are_no_text_are_errors(tmp_path: Path) -> None:
    (tmp_path / "attribution.json").write_bytes(b"\x89PNG\xff")
    with pytest.raises(SystemExit, match="error: not JSON"):
        main(["report", str(tmp_path / "attribution.json")])
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 1.0}])
    (run / "config.toml").write_bytes(b'name = "\xff"\n')
    with pytest.raises(SystemExit, match=r"error: .*config\.toml is not valid TOML"):
        main(["report", str(run)])


def test_the_report_of_a_run_has_its_place(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 1.0}])
    with pytest.raises(SystemExit, match=r"error: --output is for an attribution\.json"):
        main(["report", str(run), "--output", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()


def test_following_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 1.0}])
    (run / "config.toml").write_text("steps = 2\n")
    reloads: list[bool] = []

    def next_step(_: float) -> None:
        reloads.append("refresh" in (run / "report.html").read_text())
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 2, "reward/mean": 2.0}) + "\n")

    monkeypatch.setattr("moe_replay.cli.report.time.sleep", next_step)
    main(["report", str(run), "--follow"])
    assert reloads == [True]
    assert capsys.readouterr().out.splitlines() == [f"step 1: {run / 'report.html'}", str(run / "report.html")]
    assert "refresh" not in (run / "report.html").read_text()
    (run / "config.toml").write_text("steps = 1\n")  # fewer than were made before
    main(["report", str(run), "--follow"])
    assert (reloads, capsys.readouterr().out.splitlines()[-1]) == ([True], str(run / "report.html"))


def test_names_are_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert('1')</script>&<img src=x onerror=alert(1)>$x$"
    lines = [{"step": 1, "reward/mean": 0.1, f"reward/{hostile}": 0.2, "reward/other": 0.3}]
    runs = [write_run(tmp_path / f"{name}-<script>x<!--", lines, model=hostile) for name in ("a", "_b")]
    found = check_stands_alone(write_run_report(runs[0]))
    assert "a-<script>x<!--" in found.text
    assert found.text.count(hostile) >= 3  # head, settings, last values; and in a figure
    compared = check_stands_alone(write_comparison(runs, tmp_path / "c.html"))
    assert compared.text.count(runs[1].name) > 1 + len(compared.titles)  # head, tables, and the legend of each figure
    made = attribution()
    assert "a <b>tiny</b> one" in check_stands_alone(write_attribution_report(made, tmp_path / "a.html")).text


def test_long_runs_and_deep_models_stay_small(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    lines = [
        {
            "step": step,
            "reward/mean": float(chance.random()),
            "mismatch/rollout_vs_old/k3_kl": float(chance.random()),
            **{f"routing/agreement/layer_{layer:03d}": float(chance.random()) for layer in range(60)},
        }
        for step in range(1, 1501)
    ]
    page = write_run_report(write_run(tmp_path / "run", lines))
    assert page.stat().st_size < 400_000
    check_stands_alone(page)


def test_no_run_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"not a run folder.*metrics\.jsonl"):
        write_run_report(tmp_path)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"moe-replay\[report\]"):
        render("name", "title", "caption", lambda axes: None)


# ---- attribution -----------------------------------------------------------------------------------------------------


def test_an_attribution_has_its_figures_and_its_table(tmp_path: Path) -> None:
    made = Attribution.from_json(attribution().to_json())
    page = write_attribution_report(made, tmp_path / "deep" / "attribution.html")
    found = check_stands_alone(page)
    assert found.titles == ATTRIBUTION_FIGURES
    assert {path.stem for path in (page.parent / "attribution-figures").glob("*.png")} == ATTRIBUTION_FIGURES
    assert "The routes are aligned" in found.text
    assert (
        "is 0.009 per token with native routing and 0.001 with the rollout's routes replayed: 9 times lower"
        in found.text
    )
    assert "k3 (KL per token) 0.009 0.008 0.008 0.001" in found.text


def test_an_attribution_of_traces_alone(tmp_path: Path) -> None:
    found = check_stands_alone(write_attribution_report(attribution(routes_only=True), tmp_path / "a.html"))
    assert found.titles == ATTRIBUTION_FIGURES - {"scatter", "ratios"}


# ---- side by side ----------------------------------------------------------------------------------------------------


def test_compared_runs_are_both_named_in_tables_and_figures(compared: Path) -> None:
    found = check_stands_alone(compared)
    assert {"reward-mean", "mismatch-rollout-vs-old-k3-kl", "loss-grad-norm", "time-step"} <= found.titles
    assert {"mismatch-old-vs-train-ratio-mean", "mismatch-rollout-vs-train-ratio-mean"} <= found.titles
    for name in ("first-of-two", "second"):
        assert found.text.count(name) > len(found.titles)
    assert 'replay.mode "r3" "off"' in found.text
    assert "model.path" not in found.text  # the same in both
    assert {path.stem for path in (compared.parent / "both-figures").glob("*.png")} == found.titles


@pytest.mark.parametrize(
    ("steps", "gap", "noise", "said"),
    [
        (3, 1.0, 0.0, "A run of 3 steps is too short to rank them"),
        (40, 0.01, 0.2, "within the noise"),
        (40, 1.0, 0.05, "better has the highest reward at the end"),
    ],
)
def test_no_winner_is_declared_too_early(tmp_path: Path, steps: int, gap: float, noise: float, said: str) -> None:
    chance = np.random.default_rng(0)
    runs = [
        write_run(tmp_path / name, [{"step": n, "reward/mean": by + noise * chance.random()} for n in range(steps)])
        for name, by in (("worse", 0.0), ("better", gap))
    ]
    text = Tags(write_comparison(runs, tmp_path / "c.html").read_text()).text
    assert said in text
    assert ("has the highest" in text) == ("has the highest" in said)


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    lines = [{"step": 1, "reward/mean": 0.5}]
    runs = [write_run(tmp_path / place / "run", lines) for place in ("here", "there")]
    text = Tags(write_comparison(runs, tmp_path / "c.html").read_text()).text
    assert "here/run" in text
    assert "there/run" in text
    with pytest.raises(ReportError, match="with itself"):
        write_comparison([runs[0], runs[0]], tmp_path / "c.html")
    with pytest.raises(ReportError, match="two runs or more"):
        write_comparison(runs[:1], tmp_path / "c.html")


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_the_commands_write_and_say_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro", reason="the command line needs tyro")
    lines = [{"step": 1, "reward/mean": 0.5}]
    runs = [write_run(tmp_path / name, lines) for name in ("one", "two")]
    main(["report", str(runs[0])])
    printed = capsys.readouterr()
    assert Path(printed.out.strip()) == runs[0] / "report.html"
    assert printed.err.startswith("Healthy: ")
    (tmp_path / "attribution.json").write_text(json.dumps(json.loads(attribution(routes_only=True).to_json())))
    main(["report", str(tmp_path / "attribution.json")])
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "attribution.html"
    main(["compare", *map(str, runs), "--output", str(tmp_path / "both.html")])
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "both.html"
    assert (tmp_path / "both.html").is_file()
    with pytest.raises(SystemExit, match="not a run folder"):
        main(["report", str(tmp_path)])


# ---- completions -----------------------------------------------------------------------------------------------------


def kept(step: int, sample: int, completion: str = "<b>2</b>") -> Completion:
    return Completion(
        row=5,
        group=step,
        sample=sample,
        prompt="1+1=",
        completion=completion,
        reward=float(sample),
        advantage=sample - 0.5,
        scores={"accuracy": float(sample)},
        tokens=2,
        finish_reason="stop",
        weight_version=step,
    )


def test_completions_are_in_the_report_and_on_a_page_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 0.5}])
    for step in range(1, 41):
        write_completions(run, step, [kept(step, sample, f"<b>answer {step}.{sample}</b>") for sample in range(40)])
    report = write_run_report(run)
    text = report.read_text()
    assert "Completions of step 40" in text
    assert "&lt;b&gt;answer 40.39&lt;/b&gt;" in text  # the best one, and as text
    assert "answer 40.0&lt;" in text
    assert "answer 40.20&lt;" not in text
    check_stands_alone(report)
    page = (run / "completions.html").read_text()
    assert "<h2>Step 1</h2>" in page
    assert "<h2>Step 40</h2>" in page
    assert page.count("<h2>") == 16
    assert "answer 1.39&lt;" in page
    check_stands_alone(run / "completions.html")


def test_completions_that_cannot_be_read_are_a_warning(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 0.5}])
    (run / "completions").mkdir()
    (run / "completions/step-00000001.parquet").write_bytes(b"PAR1")
    assert "Completions are not shown" in write_run_report(run).read_text()
