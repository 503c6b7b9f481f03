"""What `shmload serve` takes, and what it refuses before it does anything."""

import click.testing
import pytest

from shmload._cli import main


@pytest.fixture
def refusal(configure, tmp_path):
    """Run `shmload serve` with arguments that cannot work; returns what it says."""
    configure(socket=tmp_path / "run" / "service.sock")

    def run(*arguments):
        done = click.testing.CliRunner().invoke(main, ["serve", *map(str, arguments)])
        assert done.exit_code == 2, done.output
        assert not (tmp_path / "run").exists()
        return done.output

    return run


@pytest.mark.parametrize("budget", ["40", "1", "1048575", "512KiB"])
def test_budget_without_its_unit_is_wrong_usage(refusal, budget):
    assert "is a unit missing" in refusal("--budget", budget)


@pytest.mark.parametrize("budget", ["much", "40 GX", ""])
def test_budget_that_is_no_size_is_wrong_usage(refusal, budget):
    assert "is no size" in refusal("--budget", budget)
