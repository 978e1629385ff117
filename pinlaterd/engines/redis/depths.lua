-- How many jobs there are. Arguments: the shard, levels of priority, queues.
-- Returns OK, then of each queue a table of how many, by priority, then state.

local levels = take_number()
local found = { 'OK' }
while taken < #ARGV do
  local queue = take()
  local jobs = {}
  for priority = 1, levels do
    for _, state in ipairs({ PENDING, IN_PROGRESS, SUCCEEDED, FAILED }) do
      local held = redis.pcall('ZCARD', set_key(queue, priority, state))
      jobs[#jobs + 1] = type(held) == 'number' and held or 0
    end
  end
  found[#found + 1] = jobs
end
return found
