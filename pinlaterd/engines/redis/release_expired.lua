-- End claims last renewed before a time. Arguments: the shard, token, lease in ms, queue, that time
-- in ms, limit, now_ms, priorities. Returns OK, how many failed for good, then priority and id of
-- the others.

local problem = begin_write(false)
if problem then
  return problem
end
local queue, before, limit, now = take(), take_number(), take_number(), take_number()
local most = below((window(before)))
local failed = 0
local result = { 'OK', 0 }
while taken < #ARGV and limit > 0 do
  local priority = take()
  local running = set_key(queue, priority, IN_PROGRESS)
  if not damaged_set(queue, priority) then
    limit = limit - visit_first(running, queue, most, limit, function(id)
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
