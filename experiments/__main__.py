"""Draw every figure and print every table from the results in the repository: `python -m experiments`."""

from __future__ import annotations

from experiments import (
    collapse,
    cost,
    edge,
    faults,
    growth,
    large,
    layers,
    mismatch,
    precision,
    remedies,
    results,
    training,
)
from experiments.study import draw, table_text

STUDIES = (
    mismatch.STUDY,
    edge.STUDY,
    collapse.STUDY,
    precision.STUDY,
    remedies.STUDY,
    layers.STUDY,
    cost.STUDY,
)
PLANNED = (training.STUDY, large.STUDY)
"""By `plan.md`; no arm of them has been run yet."""


def main() -> None:
    """Go through the studies; those without results are named."""
    for study in (*STUDIES, *PLANNED):
        runs = results.read(study.arms, study.folder)
        print(f"\n## {study.name}: {study.question}\n")
        if runs:
            print(table_text(study.table(runs)), draw(study, runs), sep="\n\n")
        else:
            print("nothing has been run")
    print("\n## faults: What does each planted fault look like, and which number catches it?\n")
    measured = faults.read_result()
    print(table_text(faults.rows_of_catches(measured)), table_text(faults.rows_of_numbers(measured)), sep="\n\n")
    print("\n## growth: How does the mismatch grow with depth, position, experts and precision?\n")
    grown = growth.read_results()
    print(*growth.tables(grown), growth.draw(grown), sep="\n\n")


if __name__ == "__main__":
    main()
