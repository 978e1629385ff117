-- How many jobs there are. Arguments: the shard, levels of priority, queues.
-- Returns OK, then of each queue a table of how many, by priority, then state.

local levels = take_number()
local found = { 'OK' }
while taken < #ARGV do
  local queue = take()
  local jobs = {}
  for priority = 1, levels do
    for _, state in ipairs({ PENDING, IN_PROGRESS, SUCCEEDED, FAILED }) do
      jobs[#jobs + 1] = redis.call('ZCARD', set_key(queue, priority, state))
    end
  end
  found[#found + 1] = jobs
end
return found
