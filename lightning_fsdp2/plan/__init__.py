"""Plans of a run: its memory, traffic and step time on any number of devices, computed without these devices."""

from lightning_fsdp2.plan.result import Batch, Change, Moment, Plan, RankPlan, Traffic
from lightning_fsdp2.plan.run import SearchResult, plan_run, search_run
from lightning_fsdp2.plan.search import Candidate, Search
from lightning_fsdp2.plan.table import describe
from lightning_fsdp2.plan.timing.devices import DEVICES, Device, get_device
from lightning_fsdp2.plan.timing.roofline import StepTime

__all__ = [
    "DEVICES",
    "Batch",
    "Candidate",
    "Change",
    "Device",
    "Moment",
    "Plan",
    "RankPlan",
    "Search",
    "SearchResult",
    "StepTime",
    "Traffic",
    "describe",
    "get_device",
    "plan_run",
    "search_run",
]
