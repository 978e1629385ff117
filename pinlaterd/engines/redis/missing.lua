-- Which of some ids in a queue's sets are of no job. Arguments: the shard, queue, ids. Returns OK,
-- then those.

local queue = take()
local missing = { 'OK' }
while taken < #ARGV do
  local id = take()
  if not job_exists(queue, id) then
    missing[#missing + 1] = id
  end
end
return missing
