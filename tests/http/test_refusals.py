"""A refusal costs little, whatever waits: measured here, asserted nowhere (a busy machine is slow at anything)."""

from .refusals import measure, told


async def test_refusals_are_quick(capsys):
    times, spent = await measure(200)
    with capsys.disabled():
        print(f"\n{told(times, spent)}")
    assert len(times) == 200
