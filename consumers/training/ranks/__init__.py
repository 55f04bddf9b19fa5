"""One trainer on several processes, each with a part of the model.

    sluice train ─▶ launch ─▶ every rank: sharding ─▶ TrainStep, Learner ─▶ … at commands of rank 0 (group)

- group.py     the ranks: commands, sums over them, and who is missing
- launch.py    `trainer.ranks`: starts the processes, and says how they ended
- sharding.py  FSDP2, tensor parallelism, `accelerate launch`: who splits the model, and by what
"""
