-- Scripts about who owns a shard, and its queues. Follows jobs.lua; each by its name.

local QUEUES, LEAN_QUEUES, DROPPED = 'pln_' .. SHARD, 'pls_' .. SHARD, 'plt_' .. SHARD
local MOST_PRIORITIES = 127 -- that any configuration may have had
local scripts = {}

-- The names of the queues of the same layout.
local function queues_key(queue)
  return is_lean(queue) and LEAN_QUEUES or QUEUES
end

-- What is no number is left as it is: the first enqueue reports it. A queue in PinLater's layout may
-- have the counter of a lean one of its name: it is lowered. Lean queues' ids are far above `least`,
-- those given in PinLater's layout before are below it.
local function set_counter(queue, now_ms)
  local counter, least = counter_key(queue), unused_id(queue, now_ms)
  local last = redis.pcall('GET', counter)
  local number = type(last) == 'string' and string.find(last, '^[0-9]+$') and tonumber(last)
  local is_long = number and not is_lean(queue) and number >= 10 ^ 14 and number < MOST_EXACT / 2
  if last == false or (number and number < least) or is_long then
    redis.call('SET', counter, string.format('%.0f', least))
  end
end

-- Take ownership. Arguments: now_ms, lease in ms, who asks, the token of an owner that is known to
-- have ended or ''; server and epoch of the term, 0 for none, 1 to wait for an owner of an earlier
-- term, too. The lease of an owner that has ended need not be waited for,
-- nor that of an earlier term (but for a failover's, whose fence is 0), nor need who asks again,
-- having lost its connection, wait for the end of its own.
-- Returns OK, the token, start_ms, names of queues, the fence of placements, and of each queue 1 if
-- it may have jobs with an expiry, or 0; or OWNED, the owner's token, what is left of its lease in ms; or SUPERSEDED, server and epoch of a later term; or REFUSED and why; or
-- DAMAGED.
function scripts.open()
  local now, lease_ms, who, ended = take_number(), take(), take(), take()
  local server, epoch, waits = take(), take_number(), take() == '1'
  local problem = damage(LEASE, 'string')
    or damage(RECORD, 'hash')
    or damage(QUEUES, 'zset')
    or damage(LEAN_QUEUES, 'zset')
    or damage(DROPPED, 'list')
  if problem then
    return problem
  end
  local record = redis.call('HMGET', RECORD, 'start_ms', 'fence', 'epoch', 'server')
  local last = number_in(record[3], 0, MOST_EXACT) or 0
  if epoch > 0 and (epoch < last or (epoch == last and server ~= record[4])) then
    return { 'SUPERSEDED', record[4] or '', last }
  end
  local owner = redis.call('GET', LEASE)
  if owner and owner ~= ended and string.match(owner, '^[^:]*:[^:]*:(.*)$') ~= who then
    local is_earlier = epoch > last and string.match(owner, '^[^:]*') == record[2]
    if waits or not is_earlier then
      return { 'OWNED', owner, redis.call('PTTL', LEASE) }
    end
  end
  -- The first write is one that a full Redis takes, so that a shard can be opened on it.
  local freed = redis.pcall('DEL', LEASE)
  if type(freed) == 'table' and freed.err then
    return { 'REFUSED', freed.err }
  end
  local placement = redis.call('HGET', RECORD, 'placement')
  local start = math.max(now, (number_in(record[1], 0, LATEST_ORDERED_MS) or -1) + 1)
  local fence = string.format('%.0f', (number_in(record[2], 0, MOST_EXACT / 2) or 0) + 1)
  local token = string.format('%s:%.0f:%s', fence, start, who)
  redis.call(
    'HSET', RECORD, 'owner', token, 'start_ms', string.format('%.0f', start), 'fence', fence
  )
  if epoch > 0 then
    redis.call('HSET', RECORD, 'epoch', string.format('%.0f', epoch), 'server', server)
  end
  redis.call('SET', LEASE, token, 'PX', lease_ms)
  local queues = redis.call('ZRANGE', QUEUES, 0, -1)
  for _, queue in ipairs(redis.call('ZRANGE', LEAN_QUEUES, 0, -1)) do
    if is_lean(queue) then -- and no foreign writer's
      queues[#queues + 1] = queue
    end
  end
  local may_expire = {}
  for at, queue in ipairs(queues) do
    set_counter(queue, now)
    may_expire[at] = redis.call('EXISTS', expiries_key(queue))
  end
  return { 'OK', token, start, queues, number_in(placement, 0, MOST_EXACT) or 0, may_expire }
end

-- Give up ownership. Argument: the token. If the shard has another
-- owner by now, nothing changes.
function scripts.close()
  local token = take()
  if redis.call('HGET', RECORD, 'owner') == token then
    redis.call('DEL', LEASE)
    redis.call('HSET', RECORD, 'owner', '')
  end
  return { 'OK' }
end

-- Renew the lease. Arguments: token, lease in ms.
function scripts.heartbeat()
  return begin_write(false) or { 'OK' }
end

-- Write what needs memory, and change nothing. Arguments: token, lease in ms.
function scripts.try_enqueue()
  local problem = begin_write(true)
  local written = not problem and redis.pcall('APPEND', LEASE, '')
  if type(written) == 'table' then
    return { 'REFUSED', written.err }
  end
  return problem or { 'OK' }
end

-- Note a number that the next owner is to know. Arguments: token, lease in ms, the number.
function scripts.raise_fence()
  local problem = begin_write(false)
  if not problem then
    redis.call('HSET', RECORD, 'placement', take())
  end
  return problem or { 'OK' }
end

-- Take a shard from its owner without becoming one, and keep others from it for a time: its server
-- is about to be replaced. Arguments: a token that names us, for how many ms. The owner finds with
-- its next write that it was deposed. What is held is free after that time.
function scripts.hold()
  local token, held_ms = take(), take()
  if redis.call('EXISTS', RECORD) == 1 then
    redis.call('HSET', RECORD, 'owner', token)
  end
  redis.call('SET', LEASE, token, 'PX', held_ms)
  return { 'OK' }
end

-- End whatever lease there is: the shard's server has taken another's place. No owner is harmed: its
-- token stays in the record, and with its next write it has a lease again.
function scripts.release_lease()
  redis.call('DEL', LEASE)
  return { 'OK' }
end

-- Arguments: token, lease in ms, queue, now_ms.
function scripts.create_queue()
  local problem = begin_write(false)
  local queue, now = take(), take_number()
  problem = problem or damage(queues_key(queue), 'zset')
  if problem then
    return problem
  end
  if redis.call('ZADD', queues_key(queue), 'NX', now / 1000, queue) == 1 then
    set_counter(queue, now)
  end
  return { 'OK' }
end

-- Leave what lies under a key of a queue to `vacuum`, if anything does.
local function drop(key, queue)
  if redis.call('EXISTS', key) == 0 then
    return
  end
  -- The record may have been evicted: what is not emptied yet keeps its key.
  local number = number_in(redis.call('HGET', RECORD, 'dropped'), 0, MOST_EXACT / 2) or 0
  local dropped
  repeat
    number = number + 1
    dropped = string.format('%s_%s.%.0f', DROPPED, queue, number)
  until redis.call('EXISTS', dropped) == 0
  redis.call('HSET', RECORD, 'dropped', string.format('%.0f', number))
  redis.call('RENAME', key, dropped)
  redis.call('RPUSH', DROPPED, dropped)
end

-- Arguments: token, lease in ms, queue. The queue's sets are
-- renamed, so that its jobs are in no state from now on; `vacuum` removes them, and frees their keys
-- of all queues. The jobs of a lean queue go at once.
function scripts.delete_queue()
  local problem = begin_write(false)
  local queue = take()
  problem = problem or damage(queues_key(queue), 'zset')
  if problem then
    return problem
  end
  redis.call('ZREM', queues_key(queue), queue)
  local gone = { jobs_key(queue), updates_key(queue) }
  redis.call('UNLINK', holders_key(queue), expiries_key(queue), exact_key(queue), checks_key(queue))
  drop(keys_key(queue), queue)
  for priority = 1, MOST_PRIORITIES do
    gone[#gone + 1] = runs_key(queue, priority)
    for _, state in ipairs({ PENDING, IN_PROGRESS, SUCCEEDED, FAILED }) do
      local set = set_key(queue, priority, state)
      if is_lean(queue) then
        gone[#gone + 1] = set
      else
        drop(set, queue)
      end
    end
  end
  if is_lean(queue) then
    redis.call('UNLINK', unpack(gone)) -- Redis frees them beside its work
  end
  return { 'OK' }
end

-- Free up to `limit` keys of a deleted queue's jobs; returns how many.
local function free_keys(hash, queue, limit)
  local jobs, held = open_jobs(), redis.call('HRANDFIELD', hash, limit, 'WITHVALUES')
  for at = 1, #held, 2 do
    jobs.free_key(queue, held[at], held[at + 1])
    redis.call('HDEL', hash, held[at])
  end
  return #held / 2
end

-- Remove up to `limit` jobs of deleted queues. Arguments: token, lease in ms, limit. Returns OK, how
-- many sets are left.
function scripts.vacuum()
  local problem = begin_write(false)
  if problem then
    return problem
  end
  local limit = take_number()
  while limit > 0 do
    local set = redis.call('LINDEX', DROPPED, 0)
    if not set then
      break
    end
    local queue = string.match(string.sub(set, #DROPPED + 2), '^([^.]*)')
    if redis.call('TYPE', set).ok == 'hash' then
      limit = limit - free_keys(set, queue, limit)
    else
      if damage(set, 'zset') then
        redis.call('UNLINK', set) -- what lay in place of a set when its queue was deleted
      end
      local popped = redis.call('ZPOPMIN', set, limit)
      for at = 1, #popped, 2 do
        redis.call('UNLINK', job_key(queue, popped[at]))
      end
      limit = limit - #popped / 2
    end
    if redis.call('EXISTS', set) == 0 then
      redis.call('LPOP', DROPPED)
    end
  end
  return { 'OK', redis.call('LLEN', DROPPED) }
end

return scripts[ARGV[1]]()
