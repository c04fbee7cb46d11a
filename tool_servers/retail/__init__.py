"""An online store's service desk: catalogue, customers, orders, returns, refunds, coupons and tickets.

One shared tool server for every rollout. `schema.sql` and `seed.sql` are its initial state, `server.py` lists
its tools, `tasks.jsonl` and `evaluators.jsonl` are the work an agent is given and how it is judged. README.md
has the policy.
"""
