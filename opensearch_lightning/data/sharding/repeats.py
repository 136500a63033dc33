"""RL tasks that repeat earlier ones, which only the blocks of a job together can tell."""

from collections import defaultdict
from collections.abc import Iterable

from opensearch_lightning.data.sharding.worker import WrittenBlock


def find_repeats(blocks: Iterable[WrittenBlock]) -> tuple[dict[int, set[int]], dict[int, dict[int, str]]]:
    """Which tasks repeat the question and images, or the id, of an earlier one.

    Args:
        blocks: all of a job, in their order.

    Returns:
        By number of the block: places in it of tasks that ask what an earlier one asks; and, by place, new ids of
        tasks whose id an earlier one has.
    """
    duplicates: dict[int, set[int]] = defaultdict(set)
    new_ids: dict[int, dict[int, str]] = defaultdict(dict)
    tasks = [(block.number, *task) for block in blocks for task in block.tasks]
    taken = {task_id for *_, task_id in tasks}
    contents: set[str] = set()
    ids: set[str] = set()
    for block, place, content, task_id in tasks:
        if content in contents:
            duplicates[block].add(place)
            continue
        contents.add(content)
        if task_id in ids:
            number = 2
            while (new := f"{task_id}-{number}") in taken:
                number += 1
            taken.add(new)
            new_ids[block][place] = new
        ids.add(task_id)
    return duplicates, new_ids
