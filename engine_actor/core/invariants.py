"""What must hold between steps, over requests and memory together (F181 to F188). Linear in requests and blocks."""

from __future__ import annotations

from collections.abc import Mapping

from engine_actor.errors import ContractViolation
from engine_actor.memory.cache_manager import CacheManager
from engine_actor.requests.record import RequestRecord, RequestStatus
from engine_actor.requests.table import RequestTable


def check_requests(requests: RequestTable, cache: CacheManager) -> None:
    """Raises ContractViolation at the first contradiction, naming the request."""
    records = requests.records
    for request_id in cache.paged.residents():
        if request_id not in records:
            raise ContractViolation(f"a block table belongs to request {request_id}, which does not exist")
    if cache.resident_count > cache.max_residents:
        raise ContractViolation(f"{cache.resident_count} residents, {cache.max_residents} allowed")
    for record in records.values():
        _check_request(record, requests.queue, cache)
    order = [name for name in cache.paged.residents() if records[name].has_turn]
    running = [record.id for record in requests.running()]
    if running != order:
        raise ContractViolation(f"requests {running} run, residents with a turn are {order}")


def _check_request(record: RequestRecord, queue: Mapping[int, RequestRecord], cache: CacheManager) -> None:
    name, length = record.id, record.history.length
    table = cache.table(name)
    if len(record.history.ids) != length:
        raise ContractViolation(f"request {name}: {len(record.history.ids)} tokens kept, length {length}")
    if not 0 <= record.num_computed_tokens <= length:
        raise ContractViolation(f"request {name}: processed {record.num_computed_tokens} of {length}")
    if record.num_computed_tokens != (table.num_computed_tokens if table is not None else 0):
        raise ContractViolation(f"request {name}: processed {record.num_computed_tokens} is not what its table says")
    if length > record.max_total:
        raise ContractViolation(f"request {name}: {length} tokens, {record.max_total} allowed")
    if record.status is RequestStatus.CLOSED:
        raise ContractViolation(f"request {name} is closed and still known")
    waits = record.status is RequestStatus.WAITING and table is None
    if waits != (name in queue):
        raise ContractViolation(f"request {name}: {record.status.value}, queued: {name in queue}")
    if record.status is RequestStatus.NEW and (length or table is not None):
        raise ContractViolation(f"request {name} never began a turn and holds tokens or memory")
    if record.status is RequestStatus.RUNNING and table is None:
        raise ContractViolation(f"request {name} runs and owns no memory")
    if record.has_turn and record.num_computed_tokens >= length:
        raise ContractViolation(f"request {name} runs and has nothing to compute")
