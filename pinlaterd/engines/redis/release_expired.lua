-- End claims last renewed between two times. Arguments: the shard, token, lease in ms, queue, those
-- times in ms, limit, now_ms, priorities. Returns OK, how many failed for good, then priority and
-- id of the others.

local problem = begin_write(false)
if problem then
  return problem
end
local queue, after, before = take(), take_number(), take_number()
local limit, now = take_number(), take_number()
local _, behind_after = window(after)
-- A foreign writer's score may be of no time.
local least = after < -LATEST_ORDERED_MS and '-inf' or bound(behind_after)
local most = below((window(before)))
local failed = 0
local result = { 'OK', 0 }
while taken < #ARGV and limit > 0 do
  local priority = take()
  local running = set_key(queue, priority, IN_PROGRESS)
  if not damaged_set(queue, priority) then
    limit = limit - visit_first(running, queue, least, most, limit, function(id)
      local job = held_claim(queue, priority, id)
      if fail_attempt(job, queue, priority, now, job.status, now) then
        result[#result + 1] = priority
        result[#result + 1] = id
      else
        failed = failed + 1
      end
    end)
  end
end
result[2] = failed
return result
