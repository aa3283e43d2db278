"""`python -m deploy.grafana`: write the dashboards, and what the Helm chart has copies of, into this repository."""

from __future__ import annotations

from pathlib import Path

from deploy.grafana.generate import generated


def main(root: Path) -> None:
    """Write every generated file below `root`."""
    for name, text in generated(root).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(name)


if __name__ == '__main__':
    main(Path(__file__).parents[2])
