"""HTTP of the gateway and the rollout server; pipeline/http has what every server needs.

```
request ──▶ StrictRoute ──▶ schemas ──▶ application ──▶ add_api_page
application ──▶ guarded_session ──▶ listed hosts only
```

| module      | noun                                                                    |
|-------------|-------------------------------------------------------------------------|
| schemas     | the rollout protocol: requests, answers, callbacks, error categories    |
| strict_json | strict RFC 8259 bodies, bounded before they become objects              |
| client      | requests to hosts named by a caller                                     |
| api_page    | `/docs`                                                                 |
"""
