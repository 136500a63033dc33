"""Train as conf/ describes: ``python train.py experiment=quickstart_grpo module.optimizer.lr=1e-4``."""

from opensearch_lightning.launch import main

if __name__ == "__main__":
    raise SystemExit(main())
