"""Who may do what: keys and tokens become principals, principals have scopes, tenants and quotas, and deeds are told.

`principal` has the words, `rights` the one table of what each scope may do, `keys` and `tokens` what is shown, `quotas`
what a key may use, `entrance` puts them together, `reception` takes a request through it into its room, `audit` writes
down, `pages` is what the wire has of it. Whose a rollout is is asked at the entrance's routes, and where the data plane
finds it (`megamcp.control`).
"""
