-- Take ownership. Arguments: the shard, now_ms, lease in ms, who asks, the token of an owner that
-- is known to have ended or '', 1 if who asks was an owner before and did not end in order: a
-- replica that has taken the server's place may not know of that. The lease of an owner that has
-- ended need not be waited for, nor need who asks again, having lost its connection, wait for the
-- end of its own. Returns OK, the token, start_ms, clean, names of queues; or OWNED, the owner's
-- token, what is left of its lease in ms; or REFUSED and why; or DAMAGED.

local now, lease_ms, who, ended = take_number(), take(), take(), take()
local ended_badly = take() == '1'

local problem = damage(LEASE, 'string')
  or damage(RECORD, 'hash')
  or damage(QUEUES, 'zset')
  or damage(LEAN_QUEUES, 'zset')
  or damage(DROPPED, 'list')
if problem then
  return problem
end
local owner = redis.call('GET', LEASE)
if owner and owner ~= ended and string.match(owner, '^[^:]*:[^:]*:(.*)$') ~= who then
  return { 'OWNED', owner, redis.call('PTTL', LEASE) }
end
-- The first write is one that a full Redis takes, so that a shard can be opened on it.
local freed = redis.pcall('DEL', LEASE)
if type(freed) == 'table' and freed.err then
  return { 'REFUSED', freed.err }
end

local record = redis.call('HMGET', RECORD, 'start_ms', 'clean', 'fence')
local start = math.max(now, (number_in(record[1], 0, LATEST_ORDERED_MS) or -1) + 1)
local clean = record[2] ~= '0' and not ended_badly
local fence = string.format('%.0f', (number_in(record[3], 0, MOST_EXACT / 2) or 0) + 1)
local token = string.format('%s:%.0f:%s', fence, start, who)
redis.call(
  'HSET', RECORD, 'owner', token, 'start_ms', string.format('%.0f', start), 'clean', 0,
  'fence', fence
)
redis.call('SET', LEASE, token, 'PX', lease_ms)

local queues = redis.call('ZRANGE', QUEUES, 0, -1)
for _, queue in ipairs(redis.call('ZRANGE', LEAN_QUEUES, 0, -1)) do
  if is_lean(queue) then -- and no foreign writer's
    queues[#queues + 1] = queue
  end
end
for _, queue in ipairs(queues) do
  raise_counter(queue, now)
end
return { 'OK', token, start, clean and 1 or 0, queues }
