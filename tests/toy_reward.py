"""A reward that a random policy can learn from: how often it says a token of even id."""

from opensearch_lightning.types import RewardParts, Task, Trajectory


class EvenTokens:
    """The fraction of sampled tokens with an even id."""

    async def score(self, task: Task, trajectory: Trajectory) -> RewardParts:
        sampled = trajectory.token_ids[trajectory.step_ids >= 0]
        total = float((sampled % 2 == 0).double().mean()) if len(sampled) else 0.0
        return RewardParts(total=total, format=1.0, accuracy=0.0, query=0.0)
