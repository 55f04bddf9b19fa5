"""How many workers KEDA's ScaledObject and the HPA that it makes would run, as their documentation says.

| | |
|---|---|
| none, and jobs | one (KEDA: the metric is above its activation value, 0) |
| some, and no job for `cooldown_s` | none (KEDA scales to zero, and only then is the cooldown asked) |
| else (HPA, `AverageValue`) | ceil(jobs / threshold), within 1 and `most`; as before if within 10 % of that |
| fewer than now | not below what was right in the last `stabilization_s`, nor `down_percent` fewer in `down_period_s` |
| more than now | at most twice as many, or 4 more, in 15 s (the HPA's default) |

https://keda.sh/docs/latest/reference/scaledobject-spec,
https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_TOLERANCE = 0.1
_UP_PERIOD_S, _UP_PODS = 15.0, 4


@dataclass
class Autoscaler:
    """Times in seconds, of the clock that `decide` is called with."""

    threshold: float
    most: int
    cooldown_s: float
    stabilization_s: float
    down_percent: float
    down_period_s: float
    up_period_s: float = _UP_PERIOD_S
    _active_at: float = -math.inf
    _recommended: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    _changes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    @classmethod
    def of(cls, manifest: Path, *, faster: float = 1.0, **changes: Any) -> Autoscaler:
        """As the ScaledObject of this file says, with all times divided."""
        [spec] = [each["spec"] for each in yaml.safe_load_all(manifest.read_text()) if each["kind"] == "ScaledObject"]
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        [policy], [trigger] = down["policies"], spec["triggers"]
        assert policy["type"] == "Percent"
        given: dict[str, Any] = {
            "threshold": float(trigger["metadata"]["listLength"]),
            "most": spec["maxReplicaCount"],
            "cooldown_s": spec["cooldownPeriod"] / faster,
            "stabilization_s": down["stabilizationWindowSeconds"] / faster,
            "down_percent": policy["value"],
            "down_period_s": policy["periodSeconds"] / faster,
            "up_period_s": _UP_PERIOD_S / faster,
        }
        return cls(**{**given, **changes})

    def decide(self, now: float, jobs: int, replicas: int) -> int:
        """How many there should be; the caller makes it so."""
        wanted = self._wanted(now, jobs, replicas)
        if replicas and wanted and wanted != replicas:  # from and to none is KEDA's, which the HPA doesn't count
            self._changes.append((now, wanted - replicas))
        return wanted

    def _wanted(self, now: float, jobs: int, replicas: int) -> int:
        if jobs > 0:
            self._active_at = now
        if replicas == 0:
            return int(jobs > 0)
        if jobs == 0 and now - self._active_at >= self.cooldown_s:
            self._recommended.clear()
            return 0
        off = abs(1 - jobs / (self.threshold * replicas))
        asked = replicas if off <= _TOLERANCE else min(self.most, max(1, math.ceil(jobs / self.threshold)))
        self._recommended.append((now, asked))
        self._recommended = [each for each in self._recommended if now - each[0] <= self.stabilization_s]
        if asked >= replicas:
            began = replicas - self._changed(now, self.up_period_s, up=True)
            return min(asked, max(2 * began, began + _UP_PODS))
        stable = min(replicas, max(each for _, each in self._recommended))
        began = replicas - self._changed(now, self.down_period_s, up=False)
        return max(stable, min(replicas, int(began * (1 - self.down_percent / 100))), 1)

    def _changed(self, now: float, period_s: float, *, up: bool) -> int:
        """The sum of changes in one direction within the period."""
        recent = (change for at, change in self._changes if now - at < period_s)
        return sum(change for change in recent if (change > 0) == up)
