"""HTTP of the gateway and the rollout server; what every server needs is in pipeline/http.

```
request ──▶ StrictRoute ──▶ schemas ──▶ application ──▶ add_api_page
application ──▶ guarded_session ──▶ listed hosts only
```

| module      | noun                                                                    |
|-------------|-------------------------------------------------------------------------|
| schemas     | the rollout protocol: requests, answers, callbacks, error categories    |
| strict_json | bodies by RFC 8259 alone, bounded before they become objects            |
| client      | requests to hosts that a caller named                                   |
| api_page    | `/docs`                                                                 |
"""
