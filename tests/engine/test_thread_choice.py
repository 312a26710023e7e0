"""Which number of threads small steps run on, in simulated time."""

from tailrace.engine.thread_choice import FIRST_WAIT, LONGEST_WAIT, TRIAL_STEPS, ThreadChoice


def run(choice: ThreadChoice, steps: int, seconds: dict[int, float], tokens: int = 1) -> list[int]:
    """Threads of each step, where a step takes `seconds[threads]`."""
    ran = []
    for _ in range(steps):
        ran.append(choice.threads)
        choice.took(tokens, seconds[choice.threads])
    return ran


def test_the_faster_way_is_found_and_kept():
    choice = ThreadChoice(1, 2)
    run(choice, 2 * FIRST_WAIT, {1: 0.009, 2: 0.007})
    later = run(choice, 20 * FIRST_WAIT, {1: 0.009, 2: 0.007})
    assert later.count(1) <= 0.15 * len(later)


def test_trials_of_a_slower_way_grow_rare():
    choice = ThreadChoice(1, 2)
    first, later = (run(choice, 4 * LONGEST_WAIT, {1: 0.009, 2: 0.090}) for _ in range(2))
    assert first.count(2) <= TRIAL_STEPS * 10
    assert 0 < later.count(2) <= TRIAL_STEPS * 4
    assert choice.threads in (1, 2)


def test_it_changes_its_mind_when_the_machine_does():
    choice = ThreadChoice(1, 2)
    run(choice, 8 * FIRST_WAIT, {1: 0.009, 2: 0.007})
    busy = run(choice, 4 * LONGEST_WAIT, {1: 0.010, 2: 0.060})
    assert busy[: 6 * TRIAL_STEPS].count(1) > TRIAL_STEPS  # at once: each step on two threads now costs 60 ms
    assert busy.count(2) < 20 * TRIAL_STEPS
    assert run(choice, 2 * LONGEST_WAIT, {1: 0.009, 2: 0.007})[-FIRST_WAIT:].count(2) >= FIRST_WAIT - TRIAL_STEPS


def test_steps_of_different_sizes_are_not_compared():
    choice = ThreadChoice(1, 2)
    for i in range(40 * FIRST_WAIT):
        tokens = 1 + i % 3
        choice.took(tokens, 0.001 * tokens if choice.threads == 1 else 0.0001)
    assert choice.threads == 1


def test_a_difference_within_the_noise_changes_nothing():
    choice = ThreadChoice(1, 2)
    ran = run(choice, 4 * LONGEST_WAIT, {1: 0.0090, 2: 0.0089})
    assert ran.count(2) <= 10 * TRIAL_STEPS
