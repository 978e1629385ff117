-- FAILED to PENDING, the longest failed first. Arguments: the shard, token, lease in ms, queue,
-- priority, attempts, run-after in ms, limit, now_ms. Returns OK, ids.

local problem = begin_write(false)
if problem then
  return problem
end
local queue, priority, attempts = take(), take(), take_number()
problem = damaged_set(queue, priority)
if problem then
  return problem
end
local run_after, limit, now = take_number(), take_number(), take_number()
local failed, pending = set_key(queue, priority, FAILED), set_key(queue, priority, PENDING)
local retried = { 'OK' }
visit_first(failed, queue, '-inf', '+inf', limit, function(id)
  local allowed = number_in(job_fields(queue, id, 'al')[1], 0, LARGEST_I32) or 0
  local changes = { al = math.max(allowed, attempts), ar = attempts, ra = run_after, ua = now }
  redis.call('ZREM', failed, id)
  change_job(queue, id, changes, true)
  redis.call('ZADD', pending, score_of(run_after, id), id)
  retried[#retried + 1] = id
end)
return retried
